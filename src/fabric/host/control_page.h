// What ranks of a node share besides payload: counters, doorbell, call identities, and the last
// words of a rank that failed. One a rank, in a segment of its own; written by peers.
//
// Memory order: a producer publishes data with a release increment of a counter, the waiter reads
// the counter with acquire. The doorbell only wakes: nothing is read through it.
#ifndef TIDE_FABRIC_HOST_CONTROL_PAGE_H_
#define TIDE_FABRIC_HOST_CONTROL_PAGE_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "fabric/machine/call_ring.h"
#include "fabric/machine/last_words.h"

namespace tide::host {

// A rank leaves call n only when every rank has published n, and so publishes n + 1 only then: n is
// still there while anyone compares it.
inline constexpr int kCallRing = 2;

// One counter a cache line: producers on different cores do not share lines.
struct alignas(64) SharedCounter {
  std::atomic<uint64_t> value;
};

struct ControlHeader {
  uint64_t nonce;  // random, written by the owner: a peer that reads it really shares the memory
  alignas(64) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleepers;
  // Published before the first counter of the call is raised; Executor::CompareCall reads after it
  // has seen one, or the call's number.
  machine::CallRing<kCallRing> calls;
  alignas(64) std::atomic<int32_t> awaited;  // 1 + whom the owner waits for, or 0
  std::atomic<int64_t> awaited_at;           // when it last said so: steady clock, ns
  alignas(64) machine::LastWords last_words;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

size_t CountersPerPage(const Topology& topology);
// Bytes of the control page of one rank.
int64_t ControlPageBytes(const Topology& topology);

// A view of one rank's control page. Cheap to copy; does not own the memory.
class ControlPage {
 public:
  ControlPage() = default;
  ControlPage(char* memory, const Topology& topology, int owner);

  bool valid() const { return header_ != nullptr; }
  ControlHeader& header() const { return *header_; }
  // The producer is the owner itself, of its node, or of its rail.
  std::atomic<uint64_t>& counter(Lane lane, Counter counter) const {
    return counters_[CounterIndex(lane, counter)].value;
  }
  size_t CounterIndex(Lane lane, Counter counter) const;

  // Wakes the owner if it sleeps. Call after the store it may wait for.
  void Ring() const;
  // Sleeps until the doorbell moves from `seen` or `max_ns` have passed. The caller reads `seen`
  // before it tries the conditions that it may sleep for.
  void Sleep(uint32_t seen, int64_t max_ns) const;

  // Whom the owner waits for in the end, for the reports of others. It says so again and again: one
  // that has not for `max_age` no longer runs, and what it said last proves nothing. Awaited is -1
  // then, and where it waits for nobody. A hint: the two fields are not read as one.
  void Await(int rank) const;
  int Awaited(std::chrono::nanoseconds max_age) const;

 private:
  ControlHeader* header_ = nullptr;
  SharedCounter* counters_ = nullptr;
  Topology topology_;
  int owner_ = 0;
};

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_CONTROL_PAGE_H_
