// Runs one rank's program on the calling thread.
//
// Queues are in order; the thread goes on with any queue whose next operation may run. When none
// may, it yields a few tens of times and then sleeps on its doorbell: with more ranks than cores
// pure yielding starves the ranks that have work.
#ifndef TIDE_FABRIC_HOST_EXECUTOR_H_
#define TIDE_FABRIC_HOST_EXECUTOR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/host/control_page.h"
#include "fabric/host/watchdog.h"

namespace tide::host {

// Resolves a symmetric buffer to this process's mapping of `rank`'s memory.
class AddressSpace {
 public:
  virtual ~AddressSpace() = default;
  virtual char* Resolve(int rank, SegmentAddress address) const = 0;
};

class Executor {
 public:
  // All references outlive the executor; pages are by rank, valid for this rank and its neighbours.
  Executor(int rank, const Topology& topology, const std::vector<ControlPage>& pages,
           const AddressSpace& space, const Watchdog& watchdog, std::chrono::nanoseconds timeout,
           std::function<void()> check_interrupt,
           std::function<bool(const Program&, const Operation&)> may_run);

  // Runs the call to its end and advances the counter bases. Returns the seconds in which nothing
  // could move. Throws Error(kMismatch), kTimeout, kPeerDead or what another rank failed with.
  double Run(const Call& call, TraceSink* trace);

 private:
  using Clock = std::chrono::steady_clock;

  // What one turn over all queues has come to.
  struct Turn {
    bool progress = false;
    bool held = false;                   // may_run_ holds back a queue
    const Operation* blocked = nullptr;  // what to name if nothing moves
  };

  // Sets the cursors and tells the peers which call this is.
  void Begin(const Call& call);
  // Runs the queue up to its end or to what it must wait for.
  void RunQueue(const Call& call, size_t queue, TraceSink* trace, Turn* turn);
  // Whether what the operation blocks on, if anything, has happened.
  bool Unblocked(const Call& call, const Operation& op) const;
  void RunOne(const Call& call, const Operation& op);
  bool Satisfied(const Call& call, const Operation& op) const;
  void CompareCall(const Call& call, int peer) const;
  void RunData(const Call& call, const Operation& op);
  void Copy(const Call& call, const std::vector<Piece>& pieces, int rank) const;
  void Multicast(const Call& call, const Operation& op) const;
  void Refresh(const Call& call, const Operation& op);
  void Put(const Call& call, const Operation& op) const;
  void Sum(const Call& call, const Operation& op);
  void Land(const Call& call, const Operation& op);
  void Raise(const Call& call, int peer, Counter counter) const;
  char* Resolve(const Call& call, Ref ref, int rank) const;

  // Waits until the doorbell may have moved from `seen`. Throws when waiting has become pointless.
  void Pause(const Call& call, const Operation& blocked, uint32_t seen, int* yields,
             Clock::time_point deadline) const;
  // Whom this rank waits for in the end: `producer`, or the rank for which that one waits.
  int Culprit(int producer) const;
  std::chrono::nanoseconds LongestSleep() const;
  [[noreturn]] void ThrowTimeout(const Call& call, const Operation& blocked) const;
  void ThrowIfPointless(const Call& call, const Operation& blocked) const;

  const int rank_;
  const std::vector<ControlPage>& pages_;
  const AddressSpace& space_;
  const Watchdog& watchdog_;
  const std::chrono::nanoseconds timeout_;
  const std::function<void()> check_interrupt_;
  const std::function<bool(const Program&, const Operation&)> may_run_;  // see FaultInjection
  std::vector<uint64_t>
      bases_;  // by CounterIndex: what earlier calls have added to the own counters
  std::vector<size_t> cursors_;  // by queue: index of its next operation; kept to reuse the memory
  std::vector<Event> recorded_;  // in this call; kept to reuse the memory
  std::vector<const void*> sources_;  // of one sum; kept to reuse the memory
  std::vector<char> wanted_;          // a block of a refresh; likewise
};

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_EXECUTOR_H_
