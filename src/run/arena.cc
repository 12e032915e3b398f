#include "run/arena.h"

#include <fmt/format.h>

#include <algorithm>

#include "tide/error.h"

namespace tide::internal {
namespace {

// Regions start on a boundary that no two of them share a cache line or a vector across.
constexpr int64_t kRegionAlignment = 256;

int64_t Align(int64_t bytes) { return AlignUp(bytes, kRegionAlignment); }

}  // namespace

Arena::Arena(Fabric* fabric, const AllGatherOptions& all_gather,
             const ReduceScatterOptions& reduce_scatter)
    : fabric_(*fabric),
      all_gather_(all_gather),
      staging_bounds_(reduce_scatter.staging),
      reduce_scatter_(reduce_scatter) {
  reduce_scatter_.staging.slot_bytes = 0;
}

bool Arena::HoldsAllGather(const GroupLayout& layout) const {
  return AllGatherRegions(layout, fabric_.topology(), all_gather_).stage <= regions_.stage;
}

bool Arena::HoldsReduceScatter(const GroupLayout& layout, const ReduceScatterSpec& spec) const {
  if (fabric_.topology().local_ranks > 1 && reduce_scatter_.staging.slot_bytes == 0) return false;
  const RegionBytes needed =
      ReduceScatterRegions(layout, spec, fabric_.topology(), reduce_scatter_);
  return needed.outbox <= regions_.outbox && needed.spare <= regions_.spare &&
         needed.inbox <= regions_.inbox && needed.generations <= regions_.generations &&
         needed.accumulator <= regions_.accumulator;
}

RegionBytes Arena::Largest(const std::vector<Need>& needs) const {
  RegionBytes largest = regions_;
  for (const Need& need : needs) {
    const RegionBytes bytes =
        ReduceScatterRegions(*need.layout, need.spec, fabric_.topology(), reduce_scatter_);
    largest.outbox = std::max(largest.outbox, Align(bytes.outbox));
    largest.spare = std::max(largest.spare, Align(bytes.spare));
    largest.inbox = std::max(largest.inbox, Align(bytes.inbox));
    largest.generations = std::max(largest.generations, bytes.generations);
    largest.accumulator = std::max(largest.accumulator, Align(bytes.accumulator));
    largest.stage = std::max(largest.stage,
                             AllGatherRegions(*need.layout, fabric_.topology(), all_gather_).stage);
  }
  return largest;
}

// One slot stages what one sibling contributes to one rank, unless it is bounded.
int64_t Arena::SlotBytes(const std::vector<Need>& needs) const {
  int64_t staged = reduce_scatter_.staging.slot_bytes;
  for (const Need& need : needs) staged = std::max(staged, StagedBytes(*need.layout, need.spec));
  return StagingSlotBytes(staged, staging_bounds_, fabric_.topology(), reduce_scatter_.round_width);
}

bool Arena::Reserve(const std::vector<Need>& needs) {
  const RegionBytes largest = Largest(needs);
  const bool stage = GrowStage(largest.stage);
  const bool reduction = GrowReduceScatter(largest, SlotBytes(needs));
  return stage || reduction;
}

bool Arena::ReserveAllGather(const GroupLayout& layout) {
  return GrowStage(AllGatherRegions(layout, fabric_.topology(), all_gather_).stage);
}

bool Arena::GrowStage(int64_t bytes) {
  if (bytes <= regions_.stage) return false;
  stage_ = fabric_.AddSegment(bytes, "all-gather receive stage", SegmentKind::kPerRank);
  regions_.stage = bytes;
  return true;
}

bool Arena::GrowReduceScatter(const RegionBytes& needed, int64_t slot_bytes) {
  RegionBytes grown = needed;
  grown.stage = regions_.stage;
  grown.staging = 0;
  StagingOptions staging = reduce_scatter_.staging;
  if (fabric_.topology().local_ranks > 1) {
    staging.slot_bytes = slot_bytes;
    grown.staging = Align(StagingRegionBytes(fabric_.topology(), staging));
  }
  // Every part only grows, so an equal sum means equal parts.
  if (grown.reduce_scatter() == regions_.reduce_scatter()) return false;
  reduction_ =
      fabric_.AddSegment(grown.reduce_scatter(), "reduce-scatter regions", SegmentKind::kPerRank);
  regions_ = grown;
  reduce_scatter_.staging = staging;
  return true;
}

BufferAddress Arena::Address(const Buffer& buffer) const {
  const int64_t outbox = regions_.staging;
  const int64_t spare = outbox + 2 * regions_.outbox;
  const int64_t inbox = spare + 2 * regions_.spare;
  const int64_t accumulator = inbox + regions_.generations * regions_.inbox;
  const StagingOptions& staging = reduce_scatter_.staging;
  switch (buffer.kind) {
    case BufferKind::kStage:
      return {nullptr, {stage_.id, 0}};
    case BufferKind::kStaging:
      return {nullptr, {reduction_.id, (buffer.index - 1) * staging.slots * staging.slot_bytes}};
    case BufferKind::kOutbox:
      return {nullptr, {reduction_.id, outbox + buffer.index * regions_.outbox}};
    case BufferKind::kSpare:
      return {nullptr, {reduction_.id, spare + buffer.index * regions_.spare}};
    case BufferKind::kInbox:
      return {nullptr, {reduction_.id, inbox + buffer.index * regions_.inbox}};
    case BufferKind::kAccumulator:
      return {nullptr, {reduction_.id, accumulator}};
    default:
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is no region of the arena", ToString(buffer)));
  }
}

}  // namespace tide::internal
