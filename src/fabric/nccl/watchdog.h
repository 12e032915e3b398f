// Sees that calls on the device come to an end.
//
// A stream that waits for a peer can be neither asked nor interrupted. So the executor writes down
// what each call waits for, and a thread polls the call's last event. The thread ends the process,
// with a report, when
//   * a call is overdue: the report compares its waits with the counters in device memory;
//   * a call waits for a rank that has ended (a rank that nobody waits for may end as it likes);
//   * two ranks have enqueued different calls.
// Its peers and the launcher notice that, and its last words tell the peers why.
#ifndef TIDE_FABRIC_NCCL_WATCHDOG_H_
#define TIDE_FABRIC_NCCL_WATCHDOG_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/nccl/counters.h"
#include "fabric/nccl/device.h"
#include "fabric/nccl/lowering.h"
#include "fabric/nccl/peers.h"
#include "tide/error.h"

namespace tide::nccl {

inline constexpr int kWatchdogExitStatus = 87;

struct PendingWait {
  int stream = 0;
  Counter counter;
  uint64_t target = 0;
  bool in_memory = true;  // false: NCCL counts, and does not tell
};

struct WatchedCall {
  EventHandle ready = nullptr;
  EventHandle done = nullptr;
  bool has_ready = false;  // recorded on the caller's stream
  Lane lane = Lane::kControl;
  CallIdentity identity;
  // Keeps `lowered`. Dropped by the caller's thread: freeing its tables may wait for the device.
  std::shared_ptr<const Prepared> program;
  const Lowered* lowered = nullptr;
  std::vector<PendingWait> waits;
  // Thread only: since when the call could run.
  std::optional<std::chrono::steady_clock::time_point> started;
};

struct WatchdogOptions {
  std::chrono::nanoseconds timeout{};
  std::chrono::nanoseconds poll = std::chrono::milliseconds(100);
  // Reads the own counters from the device; may hang if the device does.
  std::function<std::vector<uint64_t>()> read_counters;
  // Gets the report; by default it goes to stderr and the process exits.
  std::function<void(const std::string&)> expired;
};

class Watchdog {
 public:
  // References outlive the watchdog. It is the one that sleeps on `peers`.
  Watchdog(int rank, Device& device, const Counters& counters, Peers& peers,
           WatchdogOptions options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // An entry for the next call: every call is watched, since nothing may come after it. The caller
  // fills it and arms it; until then it is the caller's alone.
  WatchedCall* Claim();
  void Arm(WatchedCall* call);

 private:
  using Clock = std::chrono::steady_clock;
  // What the own counters are; nothing if the device does not answer, or not in time.
  struct Reading {
    std::optional<std::vector<uint64_t>> values;
    std::string trouble;
  };

  void Run();
  void Poll();
  // Whether the call has come to its end; reports it if it is overdue.
  bool Finished(WatchedCall* call, std::array<bool, kLanes>* busy);
  // Reports the first call under way that waits for a rank that has ended.
  void MournPeers();
  // A wait of the call that a rank that has ended will never satisfy; null if there is none.
  const PendingWait* Vain(const WatchedCall& call, const Reading& counters) const;
  Reading ReadCounters() const;
  uint64_t Value(const WatchedCall& call, const PendingWait& wait,
                 const std::vector<uint64_t>& values) const;
  bool Unsatisfied(const WatchedCall& call, const PendingWait& wait, const Reading& counters) const;

  std::string DescribeCall(const WatchedCall& call) const;
  std::string DescribeWait(const WatchedCall& call, const PendingWait& wait,
                           const Reading& counters) const;
  // The first wait of each stream that is not satisfied, a line each.
  std::string DescribeWaits(const WatchedCall& call) const;
  // Leaves the head as last words and gives up.
  void Expire(ErrorCode code, const std::string& head, const std::string& body);

  const int rank_;
  Device& device_;
  const Counters& counters_;
  Peers& peers_;
  const WatchdogOptions options_;
  std::mutex calls_mutex_;
  std::vector<std::unique_ptr<WatchedCall>> calls_;  // all entries, as many as were ever under way
  std::vector<WatchedCall*> idle_;
  std::vector<WatchedCall*> armed_;  // in the order of issue
  // Thread: kept to reuse the memory.
  std::vector<WatchedCall*> polled_;
  std::vector<WatchedCall*> under_way_;
  std::optional<Clock::time_point> mourning_since_;  // thread: when a call first waited in vain
  std::thread thread_;
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_WATCHDOG_H_
