#include "fabric/host/control_page.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace tide::host {
namespace {

int64_t CountersOffset() { return AlignUp(sizeof(ControlHeader), alignof(SharedCounter)); }

// Not FUTEX_PRIVATE: the word is shared between processes.
int64_t Futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

// Counters of one lane and producer that come before those of `kind`.
constexpr int CountersBefore(int kind) {
  int before = 0;
  for (int k = 0; k < kind; ++k) before += kCounterIndices[k];
  return before;
}
constexpr size_t kCountersPerProducer = CountersBefore(kCounterKinds);

// The same clock for all processes of the machine.
int64_t SteadyNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

size_t CountersPerPage(const Topology& topology) {
  return kLanes * kCountersPerProducer * static_cast<size_t>(topology.local_ranks + topology.nodes);
}

int64_t ControlPageBytes(const Topology& topology) {
  return AlignUp(
      CountersOffset() + static_cast<int64_t>(sizeof(SharedCounter) * CountersPerPage(topology)),
      4096);
}

ControlPage::ControlPage(char* memory, const Topology& topology, int owner)
    : header_(reinterpret_cast<ControlHeader*>(memory)),
      counters_(reinterpret_cast<SharedCounter*>(memory + CountersOffset())),
      topology_(topology),
      owner_(owner) {}

size_t ControlPage::CounterIndex(Lane lane, Counter counter) const {
  const int node = topology_.Node(counter.producer);
  const int producer = node == topology_.Node(owner_) ? topology_.Local(counter.producer)
                                                      : topology_.local_ranks + node;
  const auto producers =
      static_cast<size_t>(topology_.local_ranks) + static_cast<size_t>(topology_.nodes);
  const size_t table = static_cast<size_t>(lane) * producers + static_cast<size_t>(producer);
  return table * kCountersPerProducer +
         static_cast<size_t>(CountersBefore(static_cast<int>(counter.kind))) +
         static_cast<size_t>(counter.index);
}

void ControlPage::Await(int rank) const {
  header_->awaited.store(rank + 1, std::memory_order_relaxed);
  header_->awaited_at.store(SteadyNs(), std::memory_order_relaxed);
}

int ControlPage::Awaited(std::chrono::nanoseconds max_age) const {
  const int64_t age = SteadyNs() - header_->awaited_at.load(std::memory_order_relaxed);
  return age > max_age.count() ? -1 : header_->awaited.load(std::memory_order_relaxed) - 1;
}

void ControlPage::Ring() const {
  // Sequentially consistent with Sleep: either this sees the sleeper, or the sleeper sees the new
  // doorbell.
  header_->doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (header_->sleepers.load(std::memory_order_seq_cst) != 0) {
    Futex(&header_->doorbell, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void ControlPage::Sleep(uint32_t seen, int64_t max_ns) const {
  constexpr int64_t kSecond = 1'000'000'000;
  const timespec timeout{max_ns / kSecond, max_ns % kSecond};
  header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (header_->doorbell.load(std::memory_order_seq_cst) == seen) {
    Futex(&header_->doorbell, FUTEX_WAIT, seen, &timeout);
  }
  header_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace tide::host
