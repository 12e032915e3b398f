// An input made flat: queues of steps over all calls, counters with absolute targets, memory.
#ifndef TIDE_VERIFY_MODEL_H_
#define TIDE_VERIFY_MODEL_H_

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "verify/input.h"

namespace tide::verify {

// An operation of a program or a step of the caller.
struct Step {
  const Operation* op = nullptr;
  const CallerStep* caller = nullptr;
  int call = -1;
  int rank = 0;
  int queue = 0;
  uint32_t tick = 0;   // position in the queue, from 1
  int counter = -1;    // kSignal, kWait
  int64_t target = 0;  // kWait: increments since the start of the sequence
  int event = -1;      // records and awaits; -1: completed from the start
  int puts = 0;        // kPut: first index into Model::put_counters

  bool pacing() const { return op != nullptr && op->sync == Sync::kPacing; }
};

// A queue goes on from call to call: it is named by rank, lane and name.
struct Queue {
  int rank = 0;
  std::string name;
  std::vector<int> steps;
};

struct CounterId {
  int rank = 0;  // where it lives
  Lane lane = Lane::kControl;
  Counter counter;
};

class Model {
 public:
  explicit Model(const Input& input);

  const Input& input() const { return input_; }
  const std::vector<Step>& steps() const { return steps_; }
  const std::vector<Queue>& queues() const { return queues_; }
  // Every rank's programs as one FIFO in enqueue order, and the caller's queues.
  std::vector<std::vector<int>> Fifos() const;
  std::vector<std::vector<int>> Queues() const;

  const std::vector<CounterId>& counters() const { return counters_; }
  int put_counter(const Step& step, size_t piece) const {
    return put_counters_[static_cast<size_t>(step.puts) + piece];
  }
  int events() const { return static_cast<int>(event_waits_.size()); }
  // How many steps await the event.
  int event_waits(int event) const { return event_waits_[static_cast<size_t>(event)]; }

  const Program& program(const Step& step) const { return ProgramOf(step.call, step.rank); }
  // Where a buffer of the step's program lies.
  Place place(const Step& step, Ref ref) const;
  // Memory of an object that `rank` sees: an index below memories().
  int memory(int object, int rank) const;
  int memories() const;
  std::string MemoryName(int memory) const;
  bool lane_owned(int memory) const;

  Site SiteOf(const Step& step) const;

 private:
  const Program& ProgramOf(int call, int rank) const {
    return *input_.calls[static_cast<size_t>(call)].programs[static_cast<size_t>(rank)];
  }
  size_t PlacesIndex(int call, int rank) const {
    return static_cast<size_t>(call) * fifos_.size() + static_cast<size_t>(rank);
  }
  void AddCaller(const std::vector<CallerStep>& steps, int rank);
  void AddCall(int call, int rank);
  Step& AddStep(int queue, int call, int rank);
  int QueueOf(int rank, const std::string& name);
  int CounterOf(int rank, Lane lane, const Counter& counter);
  int EventOf(int call, int rank, const Event& event);

  const Input& input_;
  std::vector<Step> steps_;
  std::vector<Queue> queues_;
  std::vector<std::vector<int>> fifos_;
  std::vector<CounterId> counters_;
  std::vector<int64_t> bases_;  // by counter: increments of the calls so far
  std::vector<int> put_counters_;
  std::vector<int> event_waits_;
  std::vector<std::vector<Place>> places_;  // by call * ranks + rank, then buffer
  std::map<std::pair<int, std::string>, int> queue_index_;
  std::unordered_map<uint64_t, int> counter_index_;
  std::unordered_map<uint64_t, int> event_index_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_MODEL_H_
