#include "verify/contents.h"

#include <algorithm>
#include <utility>

namespace tide::verify {
namespace {

int64_t Item(DType dtype) { return static_cast<int64_t>(ItemSize(dtype)); }

Place At(Place place, int64_t offset) { return {place.object, place.offset + offset}; }

bool Has(const Program& program, BufferKind kind) {
  return std::any_of(program.buffers.begin(), program.buffers.end(),
                     [kind](const Buffer& buffer) { return buffer.kind == kind; });
}

// Calls f(parameter, offset in the output, live bytes, padding bytes) for each participant.
template <typename F>
void ForOutput(const VerifyGroup& group, int rank, const F& f) {
  const int64_t item = Item(group.reduce.output_dtype);
  int64_t offset = 0;
  for (const int param : group.reduce.params) {
    const int64_t shard = group.layout.params()[static_cast<size_t>(param)].shard_elems;
    const int64_t live = group.layout.LiveElems(param, rank);
    f(param, offset, live * item, (shard - live) * item);
    offset += shard * item;
  }
}

std::vector<Content> OutputContents(const VerifyGroup& group, Place output, int rank,
                                    const Content& live_content) {
  std::vector<Content> contents;
  ForOutput(group, rank, [&](int param, int64_t offset, int64_t live, int64_t padding) {
    Content content = live_content;
    content.place = At(output, offset);
    content.bytes = live;
    content.dtype = content.source_dtype = group.reduce.output_dtype;
    content.rank = rank;
    content.param = param;
    content.first_elem = rank * group.layout.params()[static_cast<size_t>(param)].shard_elems;
    if (live > 0) contents.push_back(content);
    if (padding > 0) {
      content.kind = ContentKind::kZero;
      content.place = At(output, offset + live);
      content.bytes = padding;
      contents.push_back(content);
    }
  });
  return contents;
}

}  // namespace

std::vector<Content> ShardContents(const VerifyGroup& group, const Program& program,
                                   const Places& places, int call) {
  std::vector<Content> contents;
  const bool resident = Has(program, BufferKind::kResident);
  int64_t packed = 0;
  for (size_t p = 0; p < group.shard_dtypes.size(); ++p) {
    const ParamLayout& param = group.layout.params()[p];
    const DType dtype = group.shard_dtypes[p];
    Content content;
    content.place = resident ? At(places.at({BufferKind::kResident, 0}), packed)
                             : places.at({BufferKind::kShard, static_cast<int>(p)});
    content.bytes = param.shard_elems * Item(dtype);
    content.kind = ContentKind::kShard;
    content.dtype = content.source_dtype = dtype;
    content.rank = program.rank;
    content.param = static_cast<int>(p);
    content.version = call;
    packed += AlignUp(content.bytes, kStagingAlignment);
    if (content.bytes > 0) contents.push_back(content);
  }
  return contents;
}

std::vector<Content> LandingContents(const GroupLayout& layout,
                                     const std::vector<DType>& shard_dtypes, Place landing,
                                     int call) {
  std::vector<Content> contents;
  for (size_t p = 0; p < layout.params().size(); ++p) {
    const ParamLayout& param = layout.params()[p];
    if (param.shard_bytes == 0) continue;
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      Content content;
      content.place = At(landing, layout.LandingOffset(static_cast<int>(p), rank));
      content.bytes = param.shard_bytes;
      content.kind = ContentKind::kShard;
      content.dtype = param.shape.dtype;
      content.source_dtype = shard_dtypes[p];
      content.rank = rank;
      content.param = static_cast<int>(p);
      content.version = call;
      contents.push_back(content);
    }
  }
  return contents;
}

std::vector<Content> GradientContents(const VerifyGroup& group, const Places& places, int rank,
                                      int call) {
  std::vector<Content> contents;
  for (size_t i = 0; i < group.reduce.params.size(); ++i) {
    const int param = group.reduce.params[i];
    const ParamShape& shape = group.layout.params()[static_cast<size_t>(param)].shape;
    Content content;
    content.bytes = shape.rows * shape.row_elems * Item(group.reduce.grad_dtypes[i]);
    if (content.bytes == 0) continue;
    content.place = places.at({BufferKind::kGradient, static_cast<int>(i)});
    content.kind = ContentKind::kGradient;
    content.dtype = content.source_dtype = group.reduce.grad_dtypes[i];
    content.rank = rank;
    content.param = param;
    content.version = call;
    contents.push_back(content);
  }
  return contents;
}

std::vector<Content> OldOutputContents(const VerifyGroup& group, Place output, int rank, int call) {
  Content old;
  old.kind = ContentKind::kOutput;
  old.version = call;
  return OutputContents(group, output, rank, old);
}

std::vector<Content> ReducedContents(const VerifyGroup& group, Place output, int rank, int call,
                                     const std::shared_ptr<const Reduction>& reduction) {
  Content reduced;
  reduced.kind = ContentKind::kReduced;
  reduced.version = call;
  reduced.reduction = reduction;
  return OutputContents(group, output, rank, reduced);
}

std::vector<std::vector<int>> ContributorWaves(const Topology& topology, int width) {
  constexpr int kExpertWidth = 8;
  if (width <= 0) width = topology.local_ranks > 1 ? topology.local_ranks : kExpertWidth;
  std::vector<std::vector<int>> waves;
  for (int c = 1; c <= topology.nodes; ++c) {
    if ((c - 1) % width == 0) waves.emplace_back();
    waves.back().push_back(c);
  }
  return waves;
}

std::vector<Content> Freed(std::vector<Content> contents) {
  for (Content& content : contents) content.kind = ContentKind::kStale;
  return contents;
}

}  // namespace tide::verify
