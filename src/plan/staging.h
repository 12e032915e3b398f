// How a reduce-scatter's slices are cut into chunks that fit a staging slot.
//
// The cut depends on the layout and the participants alone, never on the rank, so that the rank
// that fills and the owner that reads agree. Offsets are those of a full shard; rows past D_p are
// simply not sent.
#ifndef TIDE_PLAN_STAGING_H_
#define TIDE_PLAN_STAGING_H_

#include <cstdint>
#include <vector>

#include "tide/plan.h"

namespace tide::internal {

// A run of elements of one participant's shard, and where it is staged inside the slot.
struct StagedRun {
  int participant = 0;  // index into spec.params
  int64_t first_elem = 0;
  int64_t elems = 0;
  int64_t slot_offset = 0;  // bytes
};

using Chunk = std::vector<StagedRun>;

// Covers every element of every participant's shard once, in order; each chunk fits `slot_bytes`.
// slot_bytes <= 0: one chunk. Throws Error(kInvalidArgument) if a slot can't hold one aligned run.
std::vector<Chunk> CutIntoChunks(const GroupLayout& layout, const ReduceScatterSpec& spec,
                                 int64_t slot_bytes);

}  // namespace tide::internal

#endif  // TIDE_PLAN_STAGING_H_
