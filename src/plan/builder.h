// Small helpers that every planner uses to append operations to a program.
#ifndef TIDE_PLAN_BUILDER_H_
#define TIDE_PLAN_BUILDER_H_

#include <cstdint>
#include <string>
#include <utility>

#include "tide/program.h"

namespace tide::internal {

class Builder {
 public:
  // Throws Error(kUnsupported) for several nodes, Error(kInvalidArgument) for a rank outside the
  // topology.
  Builder(std::string name, const Topology& topology, int rank);

  int AddBuffer(BufferKind kind, int index, int64_t bytes);
  int AddQueue(std::string name);
  // The returned reference is valid until the next call.
  Operation& Add(int queue, OpKind kind);
  void Signal(int queue, int peer, CounterKind kind);
  void Wait(int queue, int producer, CounterKind kind, int64_t value);
  void Await(int queue, Event event);
  void Record(int queue, Event event);
  // Says that the peers' programs add `value` to the own counter (kind, producer).
  void Expect(CounterKind kind, int producer, int64_t value);

  // Signals every peer, then waits for every peer: no rank passes before all have reached it. The
  // waits sit on `wait_queue`.
  void Fence(int signal_queue, int wait_queue, CounterKind kind);

  // The i-th peer in this rank's order: (rank + i) mod L, so that no two ranks write to one owner
  // at a time.
  int Peer(int i) const { return (rank_ + i) % ranks_; }
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

  Program Finish() { return std::move(program_); }

 private:
  Program program_;
  int rank_;
  int ranks_;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_BUILDER_H_
