// The temporary regions of a communicator: receive stage, staging, outbox, spare and inbox (paper,
// section 5.4). They belong to the lanes, not to a group: a region is as large as its largest group
// needs, and every group uses it from its start.
#ifndef TIDE_RUN_ARENA_H_
#define TIDE_RUN_ARENA_H_

#include <cstdint>
#include <vector>

#include "fabric/fabric.h"
#include "tide/plan.h"

namespace tide::internal {

class Arena {
 public:
  // `reduce_scatter.staging.slot_bytes` is the upper bound of a slot, 0 for none. The fabric
  // outlives the arena.
  Arena(Fabric* fabric, const AllGatherOptions& all_gather,
        const ReduceScatterOptions& reduce_scatter);

  // The options that planners must use; they change when the arena grows.
  const AllGatherOptions& all_gather() const { return all_gather_; }
  const ReduceScatterOptions& reduce_scatter() const { return reduce_scatter_; }

  bool HoldsAllGather(const GroupLayout& layout) const;
  bool HoldsReduceScatter(const GroupLayout& layout, const ReduceScatterSpec& spec) const;

  struct Need {
    const GroupLayout* layout = nullptr;
    ReduceScatterSpec spec;
  };
  // Collective. Makes room for both collectives of all groups; returns whether anything grew.
  bool Reserve(const std::vector<Need>& needs);
  // Collective. The same for the all-gather of one group alone.
  bool ReserveAllGather(const GroupLayout& layout);

  // What is reserved now, equal on all ranks.
  const RegionBytes& regions() const { return regions_; }
  // Throws Error(kInvalidArgument) for a buffer that is no region.
  BufferAddress Address(const Buffer& buffer) const;

 private:
  RegionBytes Largest(const std::vector<Need>& needs) const;
  int64_t SlotBytes(const std::vector<Need>& needs) const;
  bool GrowStage(int64_t bytes);
  bool GrowReduceScatter(const RegionBytes& needed, int64_t slot_bytes);

  Fabric& fabric_;
  const AllGatherOptions all_gather_;
  const StagingOptions staging_bounds_;  // as above
  ReduceScatterOptions reduce_scatter_;
  RegionBytes regions_;
  SegmentView stage_;
  SegmentView reduction_;
};

}  // namespace tide::internal

#endif  // TIDE_RUN_ARENA_H_
