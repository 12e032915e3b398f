// TIDE-RS level 1 (paper, section 4.1): the local ranks of a node reduce their gradients for one
// destination at a time.
//
//   push queue   for each chunk, for each owner: wait until the owner has released the slot's
//                earlier uses, push the slices of its rows into its staging, signal `filled`
//   sum queue    for each chunk: wait until every sibling has filled it, sum in local-rank order,
//                own contribution last, signal `released` to every sibling
//
// `filled` orders a push before the sum that reads it; `released` orders that sum before the push
// that reuses the slot, in this call or the next one: the first use of a slot in a call waits for a
// base that includes all releases of earlier calls.
#ifndef TIDE_PLAN_NODE_REDUCTION_H_
#define TIDE_PLAN_NODE_REDUCTION_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "plan/builder.h"
#include "plan/reduction_shape.h"
#include "plan/shard_span.h"

namespace tide::internal {

// Contributors [first, first + count) of one pass, reduced together. Latin square: count is 1.
struct Unit {
  int pass = 0;
  int first = 1;
  int count = 1;
};

class NodeReduction {
 public:
  // Where the sum of row `row` (rank rows[row] of the unit) goes, from the run's first element on.
  using Sink = std::function<Ref(int row, const SpanRun& run)>;

  NodeReduction(Builder* builder, const ShardSpan& span, const ReductionShape& shape,
                const ReduceScatterSpec& spec, const ReduceScatterOptions& options);

  int sum_queue() const { return sum_; }
  // This rank's gradient of `rank`'s shard, from an element of it on.
  Ref Gradient(const SpanRun& run, int rank) const;
  // The destination ranks of a unit whose owner is `local`, and the part of their shards.
  std::vector<int> Rows(const Unit& unit, int local) const;
  Interval Part(const Unit& unit, int local) const;

  // Call once before the first Reduce.
  void Begin();
  // Adds the pushes and sums of one unit; `to` says whether the sum is the call's output.
  struct Target {
    Sink sink;
    DType dtype = DType::kF32;
    bool is_output = false;
  };
  void Reduce(const Unit& unit, const Target& to);
  // All sources have been read; declares the increments.
  void End();

 private:
  void Push(const Unit& unit, int owner, const Chunk& chunk);
  void Sum(const Unit& unit, const Chunk& chunk, const Target& to);
  Ref Staged(int filler, int owner, int64_t use, const StagedRun& run, int row) const;

  Builder& builder_;
  const ShardSpan& span_;
  const ReductionShape& shape_;
  const ReduceScatterSpec& spec_;
  const StagingOptions staging_;
  const std::function<void()> check_interrupt_;
  const int push_;
  const int sum_;
  std::vector<int> gradients_;
  std::vector<int> staged_;      // buffers, by distance - 1
  std::vector<int64_t> pushed_;  // chunks so far, by the owner's local rank; own: chunks summed
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_NODE_REDUCTION_H_
