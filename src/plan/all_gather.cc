// TIDE-AG on one node (paper, section 3.1).
//
// Step       who writes where                                          why it is safe
// entry      every rank signals every peer                             a landing is written only
// after its owner entered cast       own shard -> own part of the own landing, if dtypes differ
// multicast  own part of parameter p -> base_p + r*s_p on every rank   parts of different ranks are
// disjoint completion every rank signals every peer                             a landing is read
// only when all parts have landed
#include <fmt/format.h>

#include "plan/builder.h"
#include "tide/error.h"
#include "tide/plan.h"

namespace tide {
namespace {

using internal::Builder;

void CheckDtypes(const GroupLayout& layout, const std::vector<DType>& shard_dtypes) {
  if (shard_dtypes.size() != layout.params().size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("all_gather of group '{}': expected {} shards, got {}", layout.name(),
                            layout.params().size(), shard_dtypes.size()));
  }
  for (size_t p = 0; p < shard_dtypes.size(); ++p) {
    const DType gather = layout.params()[p].shape.dtype;
    if (shard_dtypes[p] != gather && (shard_dtypes[p] == DType::kU8 || gather == DType::kU8)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("all_gather of group '{}', parameter '{}': can't cast {} to {}",
                              layout.name(), layout.params()[p].shape.name, Name(shard_dtypes[p]),
                              Name(gather)));
    }
  }
}

}  // namespace

Program PlanAllGather(const GroupLayout& layout, const std::vector<DType>& shard_dtypes,
                      const Topology& topology, int rank, const AllGatherOptions& /*options*/) {
  CheckDtypes(layout, shard_dtypes);
  Builder builder("all_gather", Lane::kAllGather, topology, rank);
  const int queue = builder.AddQueue("main");
  const int landing = builder.AddBuffer(BufferKind::kLanding, 0, layout.landing_bytes());

  std::vector<CastPiece> casts;
  std::vector<Piece> from_shards;   // adopted as they are: to every rank of the node
  std::vector<Piece> from_landing;  // cast first: to the peers
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamLayout& param = layout.params()[i];
    const int p = static_cast<int>(i);
    const int shard = builder.AddBuffer(
        BufferKind::kShard, p, param.shard_elems * static_cast<int64_t>(ItemSize(shard_dtypes[i])));
    if (param.shard_bytes == 0) continue;
    const Ref dst{landing, layout.LandingOffset(p, rank)};
    if (shard_dtypes[i] == param.shape.dtype) {
      from_shards.push_back({dst, {shard, 0}, param.shard_bytes});
    } else {
      casts.push_back({dst, {shard, 0}, param.shard_elems, param.shape.dtype, shard_dtypes[i]});
      from_landing.push_back({dst, dst, param.shard_bytes});
    }
  }

  builder.Await(queue, {EventKind::kReady});
  builder.Fence(queue, CounterKind::kEntry);
  if (!casts.empty()) builder.Add(queue, OpKind::kCast).casts = std::move(casts);
  if (!from_shards.empty()) {
    builder.Add(queue, OpKind::kMulticast).pieces = std::move(from_shards);
  }
  if (!from_landing.empty()) {
    Operation& multicast = builder.Add(queue, OpKind::kMulticast);
    multicast.pieces = std::move(from_landing);
    multicast.span = Span::kPeers;
  }
  builder.Record(queue, {EventKind::kReadDone});
  builder.Fence(queue, CounterKind::kLanded);
  builder.Record(queue, {EventKind::kDone});
  return builder.Finish();
}

}  // namespace tide
