#include "fabric/nccl/counters.h"

#include <algorithm>
#include <numeric>

#include "tide/error.h"

namespace tide::nccl {
namespace {

constexpr int kIndices = [] {
  int sum = 0;
  for (const int indices : kCounterIndices) sum += indices;
  return sum;
}();

int FirstIndex(CounterKind kind) {
  return std::accumulate(kCounterIndices, kCounterIndices + static_cast<int>(kind), 0);
}

}  // namespace

Counters::Counters(const Topology& topology)
    : world_(topology.Ranks()),
      bases_(static_cast<size_t>(kLanes * kIndices) * static_cast<size_t>(world_)),
      asked_(bases_.size()),
      raised_(bases_.size()) {}

size_t Counters::Index(Lane lane, const Counter& counter) const {
  TIDE_CHECK(counter.index >= 0 && counter.index < CounterIndices(counter.kind));
  TIDE_CHECK(counter.producer >= 0 && counter.producer < world_);
  const int row = static_cast<int>(lane) * kIndices + FirstIndex(counter.kind) + counter.index;
  return static_cast<size_t>(row) * static_cast<size_t>(world_) +
         static_cast<size_t>(counter.producer);
}

uint64_t Counters::Raise(Lane lane, const Counter& counter, int peer) {
  return ++raised_[Index(lane, {counter.kind, peer, counter.index})];
}

uint64_t Counters::Target(Lane lane, const Counter& counter, int64_t value) const {
  // A wait for what lies before the first call is over.
  const int64_t target = static_cast<int64_t>(bases_[Index(lane, counter)]) + value;
  return static_cast<uint64_t>(std::max<int64_t>(target, 0));
}

uint64_t Counters::Ask(Lane lane, const Counter& counter, uint64_t target) {
  uint64_t& asked = asked_[Index(lane, counter)];
  if (target <= asked) return 0;
  const uint64_t more = target - asked;
  asked = target;
  return more;
}

void Counters::Advance(const Program& program) {
  for (const Increment& increment : program.increments) {
    bases_[Index(program.lane, increment.counter)] += static_cast<uint64_t>(increment.value);
  }
}

}  // namespace tide::nccl
