// What a reduce-scatter call looks like to every rank: sub-slices, passes, waves, rounds, blocks,
// generations and outbox depth (paper, sections 4.2, 5.2 and 5.3).
//
// A block is what one local rank reduces for one destination node in one pass:
//   latin square   one sub-slice of all L ranks of the node: L rows
//   direct         the slice of one rank of the node: one row
// Rows are `part` elements apart.
#ifndef TIDE_PLAN_REDUCTION_SHAPE_H_
#define TIDE_PLAN_REDUCTION_SHAPE_H_

#include <cstdint>
#include <vector>

#include "plan/shard_span.h"
#include "plan/waves.h"
#include "tide/plan.h"

namespace tide::internal {

// One landing: a wave of one pass.
struct Instance {
  int index = 0;
  int pass = 0;
  int wave = 0;
  int generation = 0;
};

class ReductionShape {
 public:
  // Throws Error(kInvalidArgument) for an impossible plan, naming the rule.
  ReductionShape(const ShardSpan& span, const ReduceScatterSpec& spec, const Topology& topology,
                 const ReduceScatterOptions& options);

  bool latin() const { return latin_; }
  int rows() const { return latin_ ? topology_.local_ranks : 1; }
  int passes() const { return options_.passes; }
  const std::vector<Wave>& waves() const { return waves_; }
  const std::vector<Round>& rounds() const { return rounds_; }  // of one pass

  // The part of sub-slice `slice` that pass `pass` takes. Direct: there is one slice, the whole.
  Interval Part(int slice, int pass) const;
  // Elements from one row of a block to the next.
  int64_t part() const { return part_; }

  // What travels between nodes: fp32 partials, or gradients as they are where L = 1.
  DType wire_dtype() const { return wire_; }
  int64_t block_bytes() const { return rows() * part_ * static_cast<int64_t>(ItemSize(wire_)); }
  // Whether a rank's own contribution is read from the gradient at the landing (L = 1).
  bool own_from_gradient() const { return own_from_gradient_; }

  int instances() const { return options_.passes * static_cast<int>(waves_.size()); }
  Instance At(int index) const;
  int generations() const { return generations_; }
  // The wave that uses the generation of `instance` next: in this call, or the first of a later
  // one.
  int NextWave(const Instance& instance) const;
  // Whether that use is in this call.
  bool NextIsHere(const Instance& instance) const {
    return instance.index + generations_ < instances();
  }
  bool Contains(int wave, int contributor) const;

  // Remote blocks a call, D_rem = n_part * (M - 1), and how many of them the outbox holds.
  int remote_blocks() const { return options_.passes * (topology_.nodes - 1); }
  int outbox_blocks() const { return outbox_blocks_; }
  int inbox_blocks() const;
  bool needs_accumulator() const { return needs_accumulator_; }

 private:
  const Topology topology_;
  const ReduceScatterOptions& options_;
  const int bank_;
  const bool latin_;
  std::vector<Wave> waves_;
  std::vector<Round> rounds_;
  int64_t slice_ = 0;  // elements from one sub-slice to the next
  int64_t part_ = 0;
  int64_t line_ = 0;  // elements of the span
  int generations_ = 1;
  int outbox_blocks_ = 0;
  DType wire_ = DType::kF32;
  bool own_from_gradient_ = false;
  bool needs_accumulator_ = false;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_REDUCTION_SHAPE_H_
