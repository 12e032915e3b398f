#include "fabric/nccl/watchdog.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <utility>

namespace tide::nccl {
namespace {

// How long the counters may take to be read before the report goes without them.
constexpr std::chrono::seconds kReadLimit{5};

void EndProcess(const std::string& report) {
  std::fputs(report.c_str(), stderr);
  std::fflush(stderr);
  _exit(kWatchdogExitStatus);
}

}  // namespace

Watchdog::Watchdog(int rank, Device& device, const Counters& counters, WatchdogOptions options)
    : rank_(rank), device_(device), counters_(counters), options_([&] {
        if (!options.expired) options.expired = EndProcess;
        return std::move(options);
      }()) {
  thread_ = std::thread([this] { Run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
  for (const auto& call : calls_) {
    device_.DestroyEvent(call->ready);
    device_.DestroyEvent(call->done);
  }
}

WatchedCall* Watchdog::Claim() {
  WatchedCall* call = nullptr;
  {
    const std::lock_guard lock(calls_mutex_);
    if (!idle_.empty()) {
      call = idle_.back();
      idle_.pop_back();
    }
  }
  if (call == nullptr) {
    auto fresh = std::make_unique<WatchedCall>();
    fresh->ready = device_.CreateEvent();
    fresh->done = device_.CreateEvent();
    call = fresh.get();
    calls_.push_back(std::move(fresh));
  }
  call->program.reset();
  call->waits.clear();
  call->started.reset();
  return call;
}

void Watchdog::Arm(WatchedCall* call) {
  const std::lock_guard lock(calls_mutex_);
  armed_.push_back(call);
}

void Watchdog::Run() {
  device_.MakeCurrent();
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, options_.poll, [&] { return stop_; })) {
    lock.unlock();
    try {
      Poll();
    } catch (const std::exception& error) {
      // The device has failed, and every later call on it would, too.
      options_.expired(fmt::format("tide: rank {}: {}\n", rank_, error.what()));
      return;
    }
    lock.lock();
  }
}

void Watchdog::Poll() {
  {
    const std::lock_guard lock(calls_mutex_);
    polled_ = armed_;
  }
  // Unlocked: what is armed is written by this thread alone.
  std::array<bool, kLanes> busy{};
  std::erase_if(polled_, [&](WatchedCall* call) { return !Finished(call, &busy); });
  const std::lock_guard lock(calls_mutex_);
  for (WatchedCall* call : polled_) {
    armed_.erase(std::find(armed_.begin(), armed_.end(), call));
    idle_.push_back(call);
  }
}

bool Watchdog::Finished(WatchedCall* call, std::array<bool, kLanes>* busy) {
  if (device_.Finished(call->done)) return true;
  const auto now = std::chrono::steady_clock::now();
  // The clock starts when the caller's work before it and the lane's calls before it are done.
  bool& lane_busy = (*busy)[static_cast<size_t>(call->lane)];
  if (!call->started && !lane_busy && (!call->has_ready || device_.Finished(call->ready))) {
    call->started = now;
  }
  lane_busy = true;
  if (call->started && now - *call->started > options_.timeout) options_.expired(Report(*call));
  return false;
}

std::string Watchdog::Report(const WatchedCall& call) const {
  std::string report = fmt::format(
      "tide: rank {}: {} (call {}, key {:016x}, lane {}) has not come to its end within {:.0f} s\n",
      rank_, call.identity.text, call.identity.sequence, call.identity.key, Name(call.lane),
      std::chrono::duration<double>(options_.timeout).count());
  // A thread of its own: if the device no longer answers, neither does the read.
  auto promise = std::make_shared<std::promise<std::vector<uint64_t>>>();
  auto counters = promise->get_future();
  std::thread([promise, read = options_.read_counters] {
    try {
      promise->set_value(read());
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (counters.wait_for(kReadLimit) != std::future_status::ready) {
    return report + "  the device does not answer, its counters are unknown\n";
  }
  std::vector<uint64_t> values;
  try {
    values = counters.get();
  } catch (const std::exception& error) {
    return report + fmt::format("  the counters can't be read: {}\n", error.what());
  }
  std::vector<bool> named(call.lowered->streams.size());
  for (const PendingWait& wait : call.waits) {
    const auto stream = static_cast<size_t>(wait.stream);
    const std::string what =
        fmt::format("  stream '{}' waits for {} to reach {}", call.lowered->streams[stream],
                    ToString(wait.counter), wait.target);
    if (!wait.in_memory) {
      if (!named[stream]) report += what + ", or has passed this: NCCL does not tell\n";
      continue;
    }
    const auto at =
        static_cast<size_t>(counters_.Offset(call.lane, wait.counter)) / sizeof(uint64_t);
    if (values[at] >= wait.target || named[stream]) continue;
    named[stream] = true;
    report += what + fmt::format(", it is {}\n", values[at]);
  }
  return report +
         "  Look for the rank that stopped earlier, or is in another call. Restart the job; "
         "a slow rank needs a longer timeout.\n";
}

}  // namespace tide::nccl
