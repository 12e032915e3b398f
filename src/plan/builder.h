// Small helpers that every planner uses to append operations to a program.
#ifndef TIDE_PLAN_BUILDER_H_
#define TIDE_PLAN_BUILDER_H_

#include <cstdint>
#include <string>
#include <utility>

#include "tide/program.h"

namespace tide::internal {

// Throws Error(kInvalidArgument) unless the layout was made for the topology's ranks.
void CheckRanks(const GroupLayout& layout, const Topology& topology);

class Builder {
 public:
  // Throws Error(kInvalidArgument) for an empty topology or a rank outside of it.
  Builder(std::string name, Lane lane, const Topology& topology, int rank);

  int AddBuffer(BufferKind kind, int index, int64_t bytes);
  int AddQueue(std::string name);
  // The returned reference is valid until the next call.
  Operation& Add(int queue, OpKind kind);
  // Adds one to the counter (kind, own rank, index) on `peer`, which may be this rank.
  Operation& Signal(int queue, int peer, CounterKind kind, int index = 0);
  // Blocks until the counter has risen by `value` in this call.
  Operation& Wait(int queue, Counter counter, int64_t value);
  void Await(int queue, Event event);
  void Record(int queue, Event event);
  // A local event that nothing has used yet.
  Event NewEvent() { return {EventKind::kLocal, local_events_++}; }
  // Says that the programs of a call add `value` to the own counter.
  void Expect(Counter counter, int64_t value);

  // Signals every sibling.
  void SignalSiblings(int queue, CounterKind kind, int index = 0);
  // Blocks until every sibling has signalled `times` times in this call.
  void WaitForSiblings(int queue, CounterKind kind, int64_t times, int index = 0);
  // Says that every sibling signals `times` times in a call.
  void ExpectOfSiblings(CounterKind kind, int64_t times, int index = 0);
  // Signals every sibling, then waits for every sibling: no rank of the node passes before all have
  // reached it. Once a call.
  void Fence(int queue, CounterKind kind);

  // The i-th sibling in this rank's order: local rank (l + i) mod L of the same node, so that no
  // two ranks write to one owner at a time. i = 0 is this rank.
  int Sibling(int i) const { return topology().Rank(node(), (local() + i) % siblings()); }
  // The rank of the same rail (local index) that is `distance` nodes away, modulo M; may be
  // negative.
  int RailPeer(int distance) const;
  const Topology& topology() const { return program_.topology; }
  int rank() const { return program_.rank; }
  int node() const { return topology().Node(rank()); }
  int local() const { return topology().Local(rank()); }
  int siblings() const { return topology().local_ranks; }
  int nodes() const { return topology().nodes; }

  Program Finish() { return std::move(program_); }

 private:
  Program program_;
  int local_events_ = 0;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_BUILDER_H_
