// The result of a reduce-scatter on one rank: the concatenation of R_p * K_p elements a participant
// (paper, equation 5), and the fp32 accumulator before it where several waves would otherwise be
// rounded one by one.
#ifndef TIDE_PLAN_REDUCTION_OUTPUT_H_
#define TIDE_PLAN_REDUCTION_OUTPUT_H_

#include <cstdint>
#include <vector>

#include "plan/builder.h"
#include "plan/shard_span.h"

namespace tide::internal {

class ReductionOutput {
 public:
  ReductionOutput(Builder* builder, const ShardSpan& span, const ReduceScatterSpec& spec,
                  bool accumulator);

  // Where sums and landings write: the output, or the accumulator.
  Ref At(const SpanRun& run) const;
  DType dtype() const { return accumulator_ >= 0 ? DType::kF32 : spec_.output_dtype; }

  // Before the first and after the last sum.
  void Begin(int queue);
  void End(int queue);

 private:
  int64_t Elem(const SpanRun& run) const;
  // Live elements of every participant.
  std::vector<SpanRun> Live() const;
  // Rows past D_p are zero; an accumulating call finds them zero already.
  void ZeroPadding(int queue);

  Builder& builder_;
  const ShardSpan& span_;
  const ReduceScatterSpec& spec_;
  std::vector<int64_t> first_elems_;  // of each participant
  int output_ = 0;
  int accumulator_ = -1;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_REDUCTION_OUTPUT_H_
