#include "plan/builder.h"

#include <fmt/format.h>

#include "tide/error.h"
#include "tide/plan.h"

namespace tide::internal {

Builder::Builder(std::string name, const Topology& topology, int rank)
    : rank_(rank), ranks_(topology.Ranks()) {
  if (topology.nodes != 1) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} over {} nodes: only one node is planned so far; use the stock path",
                            name, topology.nodes));
  }
  if (rank < 0 || rank >= ranks_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: expected a rank in [0, {}), got {}", name, ranks_, rank));
  }
  program_.name = std::move(name);
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

void Builder::Signal(int queue, int peer, CounterKind kind) {
  Operation& op = Add(queue, OpKind::kSignal);
  op.peer = peer;
  op.counter = {kind, rank_};
}

void Builder::Wait(int queue, int producer, CounterKind kind, int64_t value) {
  Operation& op = Add(queue, OpKind::kWait);
  op.counter = {kind, producer};
  op.value = value;
}

void Builder::Await(int queue, Event event) { Add(queue, OpKind::kAwait).event = event; }

void Builder::Record(int queue, Event event) { Add(queue, OpKind::kRecord).event = event; }

void Builder::Expect(CounterKind kind, int producer, int64_t value) {
  program_.increments.push_back({{kind, producer}, value});
}

void Builder::Fence(int signal_queue, int wait_queue, CounterKind kind) {
  for (int i = 1; i < ranks_; ++i) Signal(signal_queue, Peer(i), kind);
  for (int i = 1; i < ranks_; ++i) {
    Wait(wait_queue, Peer(i), kind, 1);
    Expect(kind, Peer(i), 1);
  }
}

}  // namespace tide::internal

namespace tide {

Program PlanBarrier(const Topology& topology, int rank) {
  internal::Builder builder("barrier", topology, rank);
  const int queue = builder.AddQueue("main");
  builder.Fence(queue, queue, CounterKind::kEntry);
  return builder.Finish();
}

}  // namespace tide
