// CUDA and NCCL on host memory: records what is issued and executes it later, in any order that
// streams, events, memory operations and NCCL allow.
//
// Issuing only appends to a stream. Whoever asks whether an event is finished lets a few operations
// of randomly chosen streams run, of all ranks, so that copies are late and ranks drift apart. With
// Order::kOneQueue all streams of a rank are one FIFO, as when hardware queues alias them.
#ifndef TIDE_TESTS_FABRIC_NCCL_FAKE_H_
#define TIDE_TESTS_FABRIC_NCCL_FAKE_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "fabric/nccl/device.h"
#include "fabric/nccl/nccl_fabric.h"

namespace tide::testing {

enum class Order { kStreams, kOneQueue };

// API calls of a rank that reach the device, and what they held.
struct FakeCalls {
  int copy_batches = 0;
  int copies = 0;
  int pitched = 0;
  int memory_batches = 0;
  int memory_ops = 0;
  int kernels = 0;
  int sends = 0;  // groups
  int transfers = 0;
  int rail_waits = 0;
  int events = 0;
};

// What the ranks of a communicator share.
struct FakeGroup {
  explicit FakeGroup(int ranks)
      : windows(static_cast<size_t>(ranks)), signals(static_cast<size_t>(ranks)) {}
  struct Range {
    char* start = nullptr;
    int64_t bytes = 0;
  };
  using Signal = std::tuple<int, int, int>;         // sender, signal, context
  std::vector<std::vector<Range>> windows;          // by rank, then number of the window
  std::vector<std::map<Signal, uint64_t>> signals;  // by rank: how often it was raised
};

class FakeWorld {
 public:
  FakeWorld(int ranks, unsigned seed, Order order);

  struct Operation {
    std::function<bool()> runnable;  // empty: always
    std::function<void()> run;
  };
  struct Queue {
    std::deque<Operation> operations;
    int rank = 0;
  };

  int ranks() const { return ranks_; }
  Queue* AddQueue(int rank);
  void Append(Queue* queue, Operation operation);
  // Lets some operations run, then looks at the flag.
  bool RunUntil(const bool& flag);

  // Collective over `members` ranks that use the same name: returns what all of them gave, by key.
  std::map<int, std::shared_ptr<void>> Meet(const std::string& name, int members, int key,
                                            std::shared_ptr<void> value);

  // The device of this rank runs nothing from now on; -1: of no rank.
  void Freeze(int rank) {
    const std::lock_guard lock(mutex_);
    frozen_rank_ = rank;
  }
  void LimitMemory(int rank, int64_t bytes) { memory_[static_cast<size_t>(rank)] = bytes; }
  // Whether it is there.
  bool TakeMemory(int rank, int64_t bytes) {
    return (memory_[static_cast<size_t>(rank)] -= bytes) >= 0;
  }
  FakeCalls& calls(int rank) { return calls_[static_cast<size_t>(rank)]; }
  std::mutex& mutex() { return mutex_; }

 private:
  void Step();

  struct Meeting {
    std::map<int, std::shared_ptr<void>> values;
    int left = 0;
  };

  const int ranks_;
  const Order order_;
  std::mutex mutex_;
  std::condition_variable met_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::map<std::string, Meeting> meetings_;
  std::vector<FakeCalls> calls_;
  std::vector<int64_t> memory_;  // left, by rank
  int frozen_rank_ = -1;
};

// The parts of one rank.
nccl::MakeParts FakeParts(FakeWorld& world, int rank);

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_FAKE_H_
