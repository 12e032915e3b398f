#include "plan/shard_slots.h"

#include <algorithm>
#include <utility>

#include "tide/plan.h"

namespace tide::internal {

int64_t SlotBytes(const GroupLayout& layout) {
  int64_t bytes = 0;
  for (const ParamLayout& param : layout.params()) {
    bytes += AlignUp(param.shard_bytes, kStagingAlignment);
  }
  return bytes;
}

int64_t StageBytes(const GroupLayout& layout, const Topology& topology, bool resident) {
  return (topology.nodes - (resident ? 1 : 0)) * SlotBytes(layout);
}

std::vector<Run> LandingRuns(const GroupLayout& layout, int nodes, int landing, int first,
                             int count) {
  std::vector<Run> runs;
  const int start = first % nodes;
  const int until_wrap = std::min(count, nodes - start);
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const int64_t shard_bytes = layout.params()[i].shard_bytes;
    if (shard_bytes == 0) continue;
    const auto add = [&](int node, int slots) {
      if (slots == 0) return;
      const Ref ref{landing, layout.LandingOffset(static_cast<int>(i), node)};
      runs.push_back({ref, ref, slots * shard_bytes});
    };
    add(start, until_wrap);
    add(0, count - until_wrap);
  }
  return runs;
}

ShardSlots::ShardSlots(Builder* builder, const GroupLayout& layout, int landing, bool resident)
    : builder_(*builder), layout_(layout), landing_(landing), slot_bytes_(SlotBytes(layout)) {
  int64_t offset = 0;
  for (const ParamLayout& param : layout.params()) {
    offsets_.push_back(offset);
    offset += AlignUp(param.shard_bytes, kStagingAlignment);
  }
  if (resident) resident_ = builder_.AddBuffer(BufferKind::kResident, 0, slot_bytes_);
  stage_ =
      builder_.AddBuffer(BufferKind::kStage, 0, StageBytes(layout, builder_.topology(), resident));
}

Ref ShardSlots::At(int slot, int64_t offset) const {
  if (resident_ < 0) return {stage_, slot * slot_bytes_ + offset};
  if (slot == 0) return {resident_, offset};
  return {stage_, (slot - 1) * slot_bytes_ + offset};
}

std::vector<Run> ShardSlots::Runs(int src, int dst, int count) const {
  std::vector<Run> runs;
  if (resident_ >= 0 && src == 0 && count > 0) {
    runs.push_back({At(dst, 0), At(0, 0), slot_bytes_});
    ++src;
    ++dst;
    --count;
  }
  if (count > 0) runs.push_back({At(dst, 0), At(src, 0), count * slot_bytes_});
  return runs;
}

void ShardSlots::Scatter(int queue, int first, int count) {
  std::vector<Piece> pieces;
  while (count > 0) {
    // Consecutive slots come from consecutive nodes, up to the wrap.
    const int node = (builder_.node() + first) % builder_.nodes();
    const int run = std::min(count, builder_.nodes() - node);
    if (run >= kMinMergedSlots) {
      AddPieces(first, node, run, &pieces);
    } else {
      for (int i = 0; i < run; ++i) AddPieces(first + i, node + i, 1, &pieces);
    }
    first += run;
    count -= run;
  }
  if (!pieces.empty()) builder_.Add(queue, OpKind::kMulticast).pieces = std::move(pieces);
}

void ShardSlots::AddPieces(int slot, int node, int count, std::vector<Piece>* pieces) const {
  const int rank = builder_.topology().Rank(node, builder_.local());
  for (size_t i = 0; i < offsets_.size(); ++i) {
    const int64_t shard_bytes = layout_.params()[i].shard_bytes;
    if (shard_bytes == 0) continue;
    pieces->push_back({{landing_, layout_.LandingOffset(static_cast<int>(i), rank)},
                       At(slot, offsets_[i]),
                       shard_bytes,
                       count,
                       builder_.siblings() * shard_bytes,
                       slot_bytes_});
  }
}

}  // namespace tide::internal
