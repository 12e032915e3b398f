#include "plan/builder.h"

#include <fmt/format.h>

#include "tide/error.h"
#include "tide/plan.h"

namespace tide::internal {

void CheckRanks(const GroupLayout& layout, const Topology& topology) {
  if (layout.ranks() == topology.Ranks()) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("group '{}' is laid out for {} ranks, but {} nodes of {} local ranks are "
                          "{} ranks; expected as many",
                          layout.name(), layout.ranks(), topology.nodes, topology.local_ranks,
                          topology.Ranks()));
}

Builder::Builder(std::string name, Lane lane, const Topology& topology, int rank) {
  if (topology.nodes < 1 || topology.local_ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: expected at least one node and one local rank, got {} x {}", name,
                            topology.nodes, topology.local_ranks));
  }
  if (rank < 0 || rank >= topology.Ranks()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: expected a rank in [0, {}), got {}",
                                                         name, topology.Ranks(), rank));
  }
  program_.name = std::move(name);
  program_.lane = lane;
  program_.rank = rank;
  program_.topology = topology;
}

int Builder::AddBuffer(BufferKind kind, int index, int64_t bytes) {
  program_.buffers.push_back({kind, index, bytes});
  return static_cast<int>(program_.buffers.size()) - 1;
}

int Builder::AddQueue(std::string name) {
  program_.queues.push_back(std::move(name));
  return static_cast<int>(program_.queues.size()) - 1;
}

Operation& Builder::Add(int queue, OpKind kind) {
  Operation& op = program_.operations.emplace_back();
  op.kind = kind;
  op.queue = queue;
  return op;
}

Operation& Builder::Signal(int queue, int peer, CounterKind kind, int index) {
  Operation& op = Add(queue, OpKind::kSignal);
  op.peer = peer;
  op.counter = {kind, rank(), index};
  return op;
}

Operation& Builder::Wait(int queue, Counter counter, int64_t value) {
  Operation& op = Add(queue, OpKind::kWait);
  op.counter = counter;
  op.value = value;
  return op;
}

void Builder::Await(int queue, Event event) { Add(queue, OpKind::kAwait).event = event; }

void Builder::Record(int queue, Event event) { Add(queue, OpKind::kRecord).event = event; }

void Builder::Expect(Counter counter, int64_t value) {
  if (value > 0) program_.increments.push_back({counter, value});
}

void Builder::SignalSiblings(int queue, CounterKind kind, int index) {
  for (int i = 1; i < siblings(); ++i) Signal(queue, Sibling(i), kind, index);
}

void Builder::WaitForSiblings(int queue, CounterKind kind, int64_t times, int index) {
  for (int i = 1; i < siblings(); ++i) Wait(queue, {kind, Sibling(i), index}, times);
}

void Builder::ExpectOfSiblings(CounterKind kind, int64_t times, int index) {
  for (int i = 1; i < siblings(); ++i) Expect({kind, Sibling(i), index}, times);
}

void Builder::Fence(int queue, CounterKind kind) {
  SignalSiblings(queue, kind);
  WaitForSiblings(queue, kind, 1);
  ExpectOfSiblings(kind, 1);
}

int Builder::RailPeer(int distance) const {
  const int node_of_peer = ((node() + distance) % nodes() + nodes()) % nodes();
  return topology().Rank(node_of_peer, local());
}

}  // namespace tide::internal

namespace tide {

Program PlanBarrier(const Topology& topology, int rank) {
  internal::Builder builder("barrier", Lane::kControl, topology, rank);
  const int queue = builder.AddQueue("main");
  builder.Fence(queue, CounterKind::kEntry);
  // A rail peer signals after its siblings have entered, so all rails together stand for all ranks.
  for (int n = 1; n < builder.nodes(); ++n) {
    builder.Signal(queue, builder.RailPeer(n), CounterKind::kArrived);
  }
  for (int n = 1; n < builder.nodes(); ++n) {
    builder.Wait(queue, {CounterKind::kArrived, builder.RailPeer(n)}, 1);
    builder.Expect({CounterKind::kArrived, builder.RailPeer(n)}, 1);
  }
  return builder.Finish();
}

}  // namespace tide
