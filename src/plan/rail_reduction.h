// TIDE-RS level 2 (paper, sections 4.2 and 5.2): partials travel by rail and land in waves.
//
//   rail queue   for each round: wait for the credits of the blocks, put, mark the sent outbox
//                blocks free, wait for the round's arrivals
//   land queue   for each wave: wait for its arrivals, add its contributors in order to the output,
//                give the generation's credits to those who use it next
//
// Latin square: one landing reads the same block of all local ranks, so it follows their `placed`
// signals, and the credits follow their `reduced` signals. Blocks of the generation that a wave
// does not write are zeroed first.
#ifndef TIDE_PLAN_RAIL_REDUCTION_H_
#define TIDE_PLAN_RAIL_REDUCTION_H_

#include <cstdint>
#include <vector>

#include "plan/builder.h"
#include "plan/node_reduction.h"
#include "plan/reduction_output.h"
#include "plan/reduction_shape.h"
#include "plan/shard_span.h"

namespace tide::internal {

class RailReduction {
 public:
  RailReduction(Builder* builder, const ShardSpan& span, const ReductionShape& shape,
                const ReduceScatterSpec& spec, const ReduceScatterOptions& options,
                ReductionOutput* output);

  int land_queue() const { return land_; }
  // Where a unit's sums go: the outbox, or the spare for the own node.
  NodeReduction::Sink Outbox(const Unit& unit, Interval part) const;
  NodeReduction::Sink Spare(const Unit& unit, Interval part) const;
  // Before the first write to the outbox and the spare of the call, and before the blocks of `unit`
  // are written: earlier sends from them are over.
  void AwaitOutbox(int queue, const Unit& unit);
  void AwaitSpare(int queue);

  void Begin();
  // `filled`: the round's sums are in the outbox.
  void Send(const Round& round, int pass, Event filled);
  // `own`: the own-node partial of the pass is ready, if the wave has it.
  void Land(const Instance& instance, Event own, const NodeReduction& sources);
  void End();

 private:
  int Block(int pass, int contributor) const;
  Interval Part(int contributor, int pass) const;
  std::vector<PutPiece> Cut(int contributor, int pass) const;
  int64_t Bytes(int64_t elems) const;
  void WaitForCredit(int contributor, const Instance& instance);
  void GiveCredits(const Instance& instance);
  void LandDirect(const Instance& instance, const NodeReduction& sources);
  void PrepareBlocks(const Instance& instance);
  void LandLatin(const Instance& instance);
  std::vector<bool> Written(int wave) const;
  // Signals all siblings and waits for all of them; counts in `fences`.
  void Fence(CounterKind kind, int generation, std::vector<int64_t>* fences);

  Builder& builder_;
  const ShardSpan& span_;
  const ReductionShape& shape_;
  const ReduceScatterSpec& spec_;
  const ReduceScatterOptions& options_;
  ReductionOutput& output_;
  const int rail_;
  const int land_;
  int outbox_ = -1;
  int spare_ = -1;
  std::vector<int> inbox_;                       // by generation
  std::vector<std::vector<int64_t>> pieces_in_;  // so far, by index of kArrived and contributor
  std::vector<std::vector<int64_t>> credits_;  // of this call so far, by generation and contributor
  std::vector<int64_t> placed_;                // fences so far, by generation
  std::vector<int64_t> reduced_;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_RAIL_REDUCTION_H_
