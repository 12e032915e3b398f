#include "fabric/nccl/watchdog.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <utility>

namespace tide::nccl {
namespace {

// How long the counters may take to be read before the report goes without them.
constexpr std::chrono::seconds kReadLimit{5};
// How long what a process has sent may take to arrive after its end was noticed: its sockets close
// before its GPU is idle.
constexpr std::chrono::milliseconds kLastArrivals{100};

void EndProcess(const std::string& report) {
  std::fputs(report.c_str(), stderr);
  std::fflush(stderr);
  _exit(kWatchdogExitStatus);
}

}  // namespace

Watchdog::Watchdog(int rank, Device& device, const Counters& counters, Peers& peers,
                   WatchdogOptions options)
    : rank_(rank), device_(device), counters_(counters), peers_(peers), options_([&] {
        if (!options.expired) options.expired = EndProcess;
        return std::move(options);
      }()) {
  thread_ = std::thread([this] { Run(); });
}

Watchdog::~Watchdog() {
  peers_.Stop();
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
  // Signals belong to the caller's threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  device_.MakeCurrentInBackground();
  const auto poll = std::chrono::ceil<std::chrono::milliseconds>(options_.poll);
  while (peers_.Sleep(poll)) {
    try {
      if (const auto mismatch = peers_.FindMismatch()) {
        Expire(ErrorCode::kMismatch, *mismatch,
               peers_.DescribePositions() +
                   "  What is enqueued can't be taken back. Restart the job.\n");
      }
      Poll();
    } catch (const std::exception& error) {
      // The device has failed, and every later call on it would, too.
      Expire(ErrorCode::kInternal, error.what(), peers_.DescribePositions());
      return;
    }
  }
}

void Watchdog::Poll() {
  {
    const std::lock_guard lock(calls_mutex_);
    polled_ = armed_;
  }
  // Unlocked: what is armed is written by this thread alone.
  std::array<bool, kLanes> busy{};
  under_way_.clear();
  std::erase_if(polled_, [&](WatchedCall* call) {
    if (Finished(call, &busy)) return false;
    under_way_.push_back(call);
    return true;
  });
  {
    const std::lock_guard lock(calls_mutex_);
    for (WatchedCall* call : polled_) {
      armed_.erase(std::find(armed_.begin(), armed_.end(), call));
      idle_.push_back(call);
    }
  }
  MournPeers();
}

bool Watchdog::Finished(WatchedCall* call, std::array<bool, kLanes>* busy) {
  if (device_.Finished(call->done)) return true;
  const auto now = Clock::now();
  // The clock starts when the caller's work before it and the lane's calls before it are done.
  bool& lane_busy = (*busy)[static_cast<size_t>(call->lane)];
  if (!call->started && !lane_busy && (!call->has_ready || device_.Finished(call->ready))) {
    call->started = now;
  }
  lane_busy = true;
  if (call->started && now - *call->started > options_.timeout) {
    Expire(ErrorCode::kTimeout,
           fmt::format("{} has not come to its end within {:.0f} s", DescribeCall(*call),
                       std::chrono::duration<double>(options_.timeout).count()),
           DescribeWaits(*call) + peers_.DescribePositions() +
               "  Look for the rank that stopped earlier, or is in another call. Restart the job; "
               "a slow rank needs a longer timeout.\n");
  }
  return false;
}

void Watchdog::MournPeers() {
  // The last barrier and the first ones have no number: a rank that ends is no news to one that
  // leaves, and at set-up errors have other ways.
  std::erase_if(under_way_, [&](const WatchedCall* call) {
    return call->identity.sequence == 0 ||
           std::none_of(call->waits.begin(), call->waits.end(), [&](const PendingWait& wait) {
             return peers_.Gone(wait.counter.producer);
           });
  });
  const PendingWait* vain = nullptr;
  Reading counters;
  size_t at = 0;
  if (!under_way_.empty()) counters = ReadCounters();
  while (at < under_way_.size() && (vain = Vain(*under_way_[at], counters)) == nullptr) ++at;
  if (vain == nullptr) {
    mourning_since_.reset();
    return;
  }
  if (!mourning_since_) mourning_since_ = Clock::now();
  if (Clock::now() - *mourning_since_ < kLastArrivals) return;
  const int peer = vain->counter.producer;
  const WatchedCall& call = *under_way_[at];
  Expire(ErrorCode::kPeerDead, peers_.DescribeEnd(peer),
         fmt::format("  {} can't come to its end:\n{}{}  See rank {}'s own output for the cause "
                     "and restart the job.\n",
                     DescribeCall(call), DescribeWait(call, *vain, counters),
                     peers_.DescribePositions(), peer));
}

const PendingWait* Watchdog::Vain(const WatchedCall& call, const Reading& counters) const {
  const PendingWait* never_entered = nullptr;
  for (const PendingWait& wait : call.waits) {
    const int producer = wait.counter.producer;
    if (!peers_.Gone(producer)) continue;
    // A device that is slow to tell is no proof: the deadline is left.
    if (wait.in_memory && counters.values && Unsatisfied(call, wait, counters)) return &wait;
    // NCCL's own signals can't be read; but a rank that never came to this call sent none in it.
    if (peers_.LastCall(producer) < call.identity.sequence) never_entered = &wait;
  }
  return never_entered;
}

Watchdog::Reading Watchdog::ReadCounters() const {
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
    return {{}, "the device does not answer, its counters are unknown"};
  }
  try {
    return {counters.get(), ""};
  } catch (const std::exception& error) {
    return {{}, fmt::format("the counters can't be read: {}", error.what())};
  }
}

uint64_t Watchdog::Value(const WatchedCall& call, const PendingWait& wait,
                         const std::vector<uint64_t>& values) const {
  return values[static_cast<size_t>(counters_.Offset(call.lane, wait.counter)) / sizeof(uint64_t)];
}

// Also where the counter can't be read.
bool Watchdog::Unsatisfied(const WatchedCall& call, const PendingWait& wait,
                           const Reading& counters) const {
  return !counters.values || Value(call, wait, *counters.values) < wait.target;
}

std::string Watchdog::DescribeCall(const WatchedCall& call) const {
  return fmt::format("{} (call {}, key {:016x}, lane {})", call.identity.text,
                     call.identity.sequence, call.identity.key, Name(call.lane));
}

std::string Watchdog::DescribeWait(const WatchedCall& call, const PendingWait& wait,
                                   const Reading& counters) const {
  std::string text = fmt::format("  stream '{}' waits for {} to reach {}",
                                 call.lowered->streams[static_cast<size_t>(wait.stream)],
                                 ToString(wait.counter), wait.target);
  if (!wait.in_memory) return text + ", or has passed this: NCCL does not tell\n";
  if (!counters.values) return fmt::format("{}; {}\n", text, counters.trouble);
  return text + fmt::format(", it is {}\n", Value(call, wait, *counters.values));
}

std::string Watchdog::DescribeWaits(const WatchedCall& call) const {
  const Reading counters = ReadCounters();
  if (!counters.values) return fmt::format("  {}\n", counters.trouble);
  std::string text;
  std::vector<bool> named(call.lowered->streams.size());
  for (const PendingWait& wait : call.waits) {
    const auto stream = static_cast<size_t>(wait.stream);
    if (named[stream] || (wait.in_memory && !Unsatisfied(call, wait, counters))) continue;
    if (wait.in_memory) named[stream] = true;
    text += DescribeWait(call, wait, counters);
  }
  return text;
}

void Watchdog::Expire(ErrorCode code, const std::string& head, const std::string& body) {
  peers_.LeaveWords(Error(code, head));
  options_.expired(fmt::format("tide: rank {}: {}\n{}", rank_, head, body));
}

}  // namespace tide::nccl
