// Sees that calls on the device come to an end.
//
// A stream that waits for a peer can be neither asked nor interrupted. So the executor writes down
// what each call waits for, and a thread polls the call's last event. When that is overdue, the
// report compares the waits with the counters in device memory and the process ends: its peers and
// the launcher notice that.
#ifndef TIDE_FABRIC_NCCL_WATCHDOG_H_
#define TIDE_FABRIC_NCCL_WATCHDOG_H_

#include <array>
#include <chrono>
#include <condition_variable>
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
  // References outlive the watchdog.
  Watchdog(int rank, Device& device, const Counters& counters, WatchdogOptions options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // An entry for the next call: every call is watched, since nothing may come after it. The caller
  // fills it and arms it; until then it is the caller's alone.
  WatchedCall* Claim();
  void Arm(WatchedCall* call);

  // What a call waits for, in words.
  std::string Report(const WatchedCall& call) const;

 private:
  void Run();
  void Poll();
  // Whether the call has come to its end; reports it if it is overdue.
  bool Finished(WatchedCall* call, std::array<bool, kLanes>* busy);

  const int rank_;
  Device& device_;
  const Counters& counters_;
  const WatchdogOptions options_;
  std::mutex calls_mutex_;
  std::vector<std::unique_ptr<WatchedCall>> calls_;  // all entries, as many as were ever under way
  std::vector<WatchedCall*> idle_;
  std::vector<WatchedCall*> armed_;   // in the order of issue
  std::vector<WatchedCall*> polled_;  // thread: kept to reuse the memory
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_WATCHDOG_H_
