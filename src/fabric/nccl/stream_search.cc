#include "fabric/nccl/stream_search.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

namespace tide::nccl {
namespace {

using Clock = std::chrono::steady_clock;

// Streams beyond those that are needed, kept until the search ends: from a stream that goes at once
// the next one might inherit the queue.
constexpr int kSpareStreams = 16;
// A stream that stands still does so in each of them. A slow machine is no alias: the limit is
// several times what the same kernels took just before, and so many looks at the least.
constexpr int kAttempts = 3;
constexpr std::chrono::milliseconds kPatience{5};
constexpr int kSlowness = 10;
constexpr int kLeastPolls = 100;
constexpr std::chrono::microseconds kPollPause{20};

// A stream and how many others stand still while it waits.
struct Judged {
  Stream stream = nullptr;
  int compute = 0;
  int own = 0;
};

// What is left when an error ends it is not freed: a stream may still use it.
class Search {
 public:
  Search(Device& device, std::vector<Stream> compute, const std::function<void(EventHandle)>& wait)
      : device_(device),
        others_(std::move(compute)),
        compute_(others_.size()),
        wait_(wait),
        words_(device.HostWords()),
        // A kernel, since kernels are what must not be held up.
        touch_(device.MakeZero({{{0, 0}, sizeof(uint64_t)}})),
        waited_(device.CreateEvent()) {}

  FoundStreams Find(int count);

 private:
  using Numbers = std::vector<size_t>;  // of streams in others_

  void MakeEnds();
  Numbers Everyone() const;
  Judged Judge(Stream stream);
  Numbers StandStill(Stream waiter, const Numbers& suspects);
  void Touch(const Numbers& streams);
  Numbers Unfinished(const Numbers& streams);
  void Finish(const Numbers& streams);

  Device& device_;
  std::vector<Stream> others_;  // compute's, then those that were found
  const size_t compute_;        // how many are compute's
  const std::function<void(EventHandle)>& wait_;
  uint64_t* const words_;  // one to wait for, one for kernels to write
  uint64_t waits_ = 0;     // so far
  const std::unique_ptr<Kernel> touch_;
  const EventHandle waited_;
  std::vector<EventHandle> ends_;  // by number of the stream
};

FoundStreams Search::Find(int count) {
  // What compute holds, and loading the kernel, say nothing about how long it takes.
  MakeEnds();
  Touch(Everyone());
  Finish(Everyone());
  std::vector<Judged> rejected;
  int found = 0;
  for (int tries = count + kSpareStreams; found < count && tries > 0; --tries) {
    const Judged judged = Judge(device_.CreateStream());
    if (judged.compute + judged.own > 0) {
      rejected.push_back(judged);
      continue;
    }
    others_.push_back(judged.stream);
    ++found;
  }
  // In one queue TIDE's own streams cost time, but only TIDE's: the order of a program's commands
  // is one that a single queue can run.
  std::stable_sort(rejected.begin(), rejected.end(), [](const Judged& a, const Judged& b) {
    return std::pair(a.compute, a.own) < std::pair(b.compute, b.own);
  });
  FoundStreams result;
  result.streams.assign(others_.begin() + static_cast<std::ptrdiff_t>(compute_), others_.end());
  for (const Judged& judged : rejected) {
    if (static_cast<int>(result.streams.size()) == count) {
      device_.DestroyStream(judged.stream);
      continue;
    }
    result.streams.push_back(judged.stream);
    result.aliases += judged.compute > 0 ? 1 : 0;
  }
  for (const EventHandle event : ends_) device_.DestroyEvent(event);
  device_.DestroyEvent(waited_);
  return result;
}

void Search::MakeEnds() {
  while (ends_.size() < others_.size()) ends_.push_back(device_.CreateEvent());
}

Search::Numbers Search::Everyone() const {
  Numbers numbers(others_.size());
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  return numbers;
}

Judged Search::Judge(Stream stream) {
  MakeEnds();
  Numbers suspects = Everyone();
  for (int attempt = 0; attempt < kAttempts && !suspects.empty(); ++attempt) {
    suspects = StandStill(stream, suspects);
  }
  Judged judged{stream, 0, 0};
  for (const size_t number : suspects) ++(number < compute_ ? judged.compute : judged.own);
  return judged;
}

// Those whose kernels do not run while `waiter` waits. The host ends the wait, without a stream,
// which might be in the same queue.
Search::Numbers Search::StandStill(Stream waiter, const Numbers& suspects) {
  const auto start = Clock::now();
  Touch(suspects);
  Finish(suspects);
  const auto patience = std::max<Clock::duration>(kPatience, kSlowness * (Clock::now() - start));

  const MemoryOp wait{true, words_, ++waits_};
  device_.MemoryOps({&wait, 1}, waiter);
  Numbers unfinished = suspects;
  try {
    device_.Record(waited_, waiter);
    Touch(suspects);
    const auto deadline = Clock::now() + patience;
    for (int polls = 0; polls < kLeastPolls || Clock::now() < deadline; ++polls) {
      unfinished = Unfinished(unfinished);
      if (unfinished.empty()) break;
      std::this_thread::sleep_for(kPollPause);
    }
  } catch (...) {
    device_.SetHostWord(words_, waits_);
    throw;
  }
  device_.SetHostWord(words_, waits_);
  Finish(suspects);
  wait_(waited_);
  return unfinished;
}

void Search::Touch(const Numbers& streams) {
  const void* const base = words_ + 1;
  for (const size_t number : streams) {
    touch_->Launch(&base, {}, others_[number]);
    device_.Record(ends_[number], others_[number]);
  }
}

Search::Numbers Search::Unfinished(const Numbers& streams) {
  Numbers unfinished;
  for (const size_t number : streams) {
    if (!device_.Finished(ends_[number])) unfinished.push_back(number);
  }
  return unfinished;
}

void Search::Finish(const Numbers& streams) {
  for (const size_t number : streams) wait_(ends_[number]);
}

}  // namespace

FoundStreams FindStreams(Device& device, const std::vector<Stream>& compute, int count,
                         const std::function<void(EventHandle)>& wait) {
  return Search(device, compute, wait).Find(count);
}

}  // namespace tide::nccl
