// The newest calls of one rank, in memory that its peers read. Plain stores: no lock, no system
// call, no allocation.
//
// One writer, the owner. A reader may be late: each entry has a sequence number that is 0 while the
// entry changes, and a reader that finds another number before or after its copy has no entry.
#ifndef TIDE_FABRIC_MACHINE_CALL_RING_H_
#define TIDE_FABRIC_MACHINE_CALL_RING_H_

#include <atomic>
#include <cstdint>
#include <optional>

#include "fabric/fabric.h"

namespace tide::machine {

// A call, and a hash over its key and those of all calls before it: equal where two ranks have made
// the same calls up to here.
struct PublishedCall {
  CallIdentity identity;
  uint64_t history = 0;
};

// Lies in zeroed shared memory; calls are numbered from 1 without gaps.
template <int kEntries>
class CallRing {
 public:
  void Publish(const CallIdentity& call) {
    Entry& entry = At(call.sequence);
    entry.sequence.store(0, std::memory_order_relaxed);
    // Pairs with the fence in Read: whoever copies something of the new call sees the 0 or later.
    std::atomic_thread_fence(std::memory_order_release);
    history_ = (history_ ^ call.key) * kHistoryPrime;
    entry.call.identity = call;
    entry.call.history = history_;
    entry.sequence.store(call.sequence, std::memory_order_release);
    last_.store(call.sequence, std::memory_order_release);
  }

  // The newest call, 0 before the first.
  uint64_t last() const { return last_.load(std::memory_order_acquire); }

  // Nothing if the call isn't there any more, or not yet.
  std::optional<PublishedCall> Read(uint64_t sequence) const {
    const Entry& entry = At(sequence);
    if (entry.sequence.load(std::memory_order_acquire) != sequence) return std::nullopt;
    PublishedCall copy = entry.call;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.sequence.load(std::memory_order_relaxed) != sequence) return std::nullopt;
    return copy;
  }

  // The call that is in this one's place; for readers that the owner can't overtake.
  const CallIdentity& Peek(uint64_t sequence) const { return At(sequence).call.identity; }

 private:
  static constexpr uint64_t kHistoryPrime = 0x100000001b3;  // odd: no difference is lost

  struct Entry {
    std::atomic<uint64_t> sequence;
    PublishedCall call;
  };
  Entry& At(uint64_t sequence) { return entries_[sequence % kEntries]; }
  const Entry& At(uint64_t sequence) const { return entries_[sequence % kEntries]; }

  alignas(64) std::atomic<uint64_t> last_;
  uint64_t history_;  // the owner's
  Entry entries_[kEntries];
};

}  // namespace tide::machine

#endif  // TIDE_FABRIC_MACHINE_CALL_RING_H_
