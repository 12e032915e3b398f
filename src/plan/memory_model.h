// Bytes of a lane's regions as formulas: equations 9 to 12 of the paper in general form
// (docs/memory.md has them side by side).
//
// The planner's own regions (AllGatherRegions, ReduceScatterRegions) are never larger than these,
// alignment apart: they keep L - 1 staging slots where equation 10 counts L, and chunks may make a
// slot smaller than the whole block that equation 10 counts.
#ifndef TIDE_PLAN_MEMORY_MODEL_H_
#define TIDE_PLAN_MEMORY_MODEL_H_

#include <cstdint>
#include <vector>

#include "plan/waves.h"
#include "tide/plan.h"

namespace tide::internal {

// What the formulas need to know of one group and one lane.
struct MemoryShape {
  Topology topology;
  Placement placement = Placement::kLatinSquare;
  Mode mode = Mode::kInPlace;
  int wave_width = 8;
  int round_width = 2;         // k
  int passes = 1;              // n_part
  int staging_slots = 2;       // n_stg
  int64_t shard_bytes = 0;     // S
  int64_t fp32_bytes = 0;      // S_fp32
  int64_t grad_bytes = 0;      // S_grad = b_grad / 4 * S_fp32
  bool cast = false;           // the stage has a slot for the own shard
  bool mixed_grads = false;    // gradients of several dtypes
  bool narrow_output = false;  // several waves add in an accumulator of fp32
};

// The regions of one rank, bytes. Slots hold a whole block.
RegionBytes FormulaRegions(const MemoryShape& shape);

}  // namespace tide::internal

#endif  // TIDE_PLAN_MEMORY_MODEL_H_
