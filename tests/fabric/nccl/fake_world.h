// Streams on host memory: what is issued is run later, in any order that streams, events, memory
// operations and NCCL allow; a seed draws which.
//
// An operation starts at the head of its queue, when what it waits for has come. Its work is lines
// of parts: parts of a line run in order, lines in any order, other streams in between. Which queue
// goes on is drawn, and for how many parts; now and then one is held back for a spell, which may
// last until nothing else can move.
//
// At first whoever asks whether an event is finished lets a few parts of all ranks run. When the
// world is driven, only Step does: the order is then a function of the seed and of when the driver
// lets ranks enqueue (drive.h).
#ifndef TIDE_TESTS_FABRIC_NCCL_FAKE_WORLD_H_
#define TIDE_TESTS_FABRIC_NCCL_FAKE_WORLD_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace tide::testing {

enum class Order {
  kStreams,    // operations of a communicator one after the other, as NCCL runs them
  kUnordered,  // of a communicator, too, only those of one stream: no program counts on more
  kOneQueue,   // all streams of a rank are one FIFO, as when hardware queues alias them
};

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
  int streams = 0;
  int multicast_objects = 0;  // what may make one: a communicator that may, asking for an address
};

// What a rank's CUDA and NCCL can do.
struct FakeTraits {
  int lsa_teams = 1;
  bool one_sided = true;
  bool windows = true;
  bool peer_pointers = true;
  bool multimem = false;           // what NCCL says
  bool multicast_pointers = true;  // what it gives then
  bool unique_id = true;
  int refused_tables = 0;  // of sums, the next ones
};

class FakeWorld {
 public:
  using Work = std::function<void()>;
  using Line = std::deque<Work>;

  struct Operation {
    std::function<bool()> runnable;  // empty: always
    std::vector<Line> lines;         // none of them empty
    Work end;                        // may be empty
    bool pause = false;              // see Resume
  };
  struct Queue {
    std::deque<Operation> operations;
    int rank = 0;
    bool started = false;     // the first operation
    bool one_by_one = false;  // it runs its lines one after the other, this one now
    size_t line = 0;
    uint64_t held_until = 0;  // step
    int streams = 0;          // that are in it
  };

  FakeWorld(int ranks, unsigned seed, Order order);

  int ranks() const { return ranks_; }
  Order order() const { return order_; }
  // A stream gets a queue of its own, or one of those that the fewest streams are in.
  Queue* AddStream(int rank);
  void EndStream(Queue* queue);
  // Queues of each rank; as many as there are streams, if nobody says.
  void LimitQueues(size_t queues) { most_queues_ = queues; }
  void Append(Queue* queue, Operation operation);
  // Looks at the flag; undriven, after some parts have run.
  bool Reached(const bool& flag);

  // From here on only Step and Resume run anything.
  void Drive(unsigned seed);
  // Runs one part of an operation, or ends one that waits. False if nothing can move.
  bool Step();
  // Lets a queue pass the pause that it has come to. False if none has.
  bool Resume();
  // Whether everything that was issued has run.
  bool Idle();
  // Everybody's turn again.
  void EndDrive();
  // Drops what has been and will be issued; every event is finished.
  void Abandon();

  // An address that stands for memory at all of `starts`, each so many bytes; nobody can read or
  // write there.
  char* AddMulticast(const std::vector<char*>& starts, int64_t bytes);
  // What the address stands for; itself if it is none of those.
  std::vector<char*> Behind(void* address);

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
  FakeTraits& traits(int rank) { return traits_[static_cast<size_t>(rank)]; }
  // Notes that the rank ends or frees something, which on a GPU waits for its streams.
  void NoteEnd(int rank);
  // Whether a rank has done so with work left in its streams, where it would have waited for ever.
  bool ended_busy() const { return ended_busy_; }
  FakeCalls& calls(int rank) { return calls_[static_cast<size_t>(rank)]; }
  std::mutex& mutex() { return mutex_; }

 private:
  enum class Turn { kEverybody, kDriver, kNobody };

  bool CanRun(const Queue& queue) const;
  bool StepLocked();
  bool ResumeLocked();
  // Draws the queue that goes on; null if nothing can move.
  Queue* Choose();
  void RunPart(Queue* queue);

  struct Multicast {
    std::vector<char*> starts;
    int64_t bytes = 0;
    std::shared_ptr<void> reserved;
  };
  struct Meeting {
    std::map<int, std::shared_ptr<void>> values;
  };

  const int ranks_;
  const Order order_;
  size_t most_queues_;
  std::mutex mutex_;
  std::condition_variable met_;
  std::mt19937 random_;
  Turn turn_ = Turn::kEverybody;
  // By rank, in the order in which it made them: an order that does not depend on threads.
  std::vector<std::vector<std::unique_ptr<Queue>>> queues_;
  uint64_t steps_ = 0;
  Queue* current_ = nullptr;
  uint64_t burst_ = 0;  // parts that `current_` may go on for
  std::vector<Queue*> able_;
  std::vector<Queue*> held_;
  std::map<std::string, Meeting> meetings_;
  std::map<char*, Multicast> multicasts_;  // by address
  std::vector<FakeCalls> calls_;
  std::vector<FakeTraits> traits_;
  bool ended_busy_ = false;
  std::vector<int64_t> memory_;  // left, by rank
  int frozen_rank_ = -1;
};

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_FAKE_WORLD_H_
