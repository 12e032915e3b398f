// What a rank knows of the counters: how far it has raised those of its peers, what earlier calls
// have added to its own, and what its streams have waited for already.
//
// All of it is known when an operation is enqueued. Inside a node a counter is a 64-bit word in the
// waiting rank's memory and a signal writes the producer's own count there, which needs no atomic.
// Between nodes NCCL counts, and a wait asks for increments beyond those of earlier waits.
#ifndef TIDE_FABRIC_NCCL_COUNTERS_H_
#define TIDE_FABRIC_NCCL_COUNTERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tide/program.h"

namespace tide::nccl {

class Counters {
 public:
  explicit Counters(const Topology& topology);

  // Bytes of a rank's counters in memory.
  int64_t bytes() const { return static_cast<int64_t>(bases_.size() * sizeof(uint64_t)); }
  // Byte offset of a rank's own counter, the same on all ranks.
  int64_t Offset(Lane lane, const Counter& counter) const {
    return static_cast<int64_t>(Index(lane, counter) * sizeof(uint64_t));
  }

  // Counts a signal of this rank to `peer`; returns what the peer's counter is after it.
  uint64_t Raise(Lane lane, const Counter& counter, int peer);
  // What an own counter is when the wait is satisfied.
  uint64_t Target(Lane lane, const Counter& counter, int64_t value) const;
  // Notes that the waiting queue has asked for `target`; returns how far that is beyond what it has
  // asked for before.
  uint64_t Ask(Lane lane, const Counter& counter, uint64_t target);
  // The call has been enqueued.
  void Advance(const Program& program);

 private:
  size_t Index(Lane lane, const Counter& counter) const;

  int world_;
  std::vector<uint64_t> bases_;   // by Index
  std::vector<uint64_t> asked_;   // by Index
  std::vector<uint64_t> raised_;  // by Index with the peer as producer
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_COUNTERS_H_
