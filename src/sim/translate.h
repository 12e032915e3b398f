// From the commands of streams to tasks of the engine, over any number of calls.
//
// What waits for what is known beforehand: a stream is in order, an event has one record, and a
// counter has one producer whose k-th increment a wait for k follows. So a call becomes a graph.
#ifndef TIDE_SIM_TRANSLATE_H_
#define TIDE_SIM_TRANSLATE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fabric/nccl/lowering.h"
#include "sim/engine.h"
#include "sim/rates.h"
#include "tide/program.h"

namespace tide::sim {

// What a task's delay is spent on.
enum class Overhead : uint8_t { kNone, kBatch, kKernel, kMemoryOp, kNccl, kCompute };

struct TaskInfo {
  int stream = 0;
  Overhead overhead = Overhead::kNone;
  std::string what;
};

struct StreamInfo {
  int rank = 0;
  std::string name;
};

inline constexpr int kNoTask = -1;

class Translator {
 public:
  // `check_interrupt` is called now and then while calls are added; may throw to give up.
  Translator(
      const Topology& topology, const Rates& rates, std::function<void()> check_interrupt = [] {});

  // Programs of one call, one a rank. `ready`: what each rank's caller has to end first. Returns
  // the tasks that end the call. One a rank; kNoTask: at the start.
  std::vector<int> AddCall(const std::vector<Program>& programs, const std::vector<int>& ready);

  // A stream of the caller's, and what it does on it: nothing for a while, or compute that takes
  // `seconds` where nothing slows it down.
  int AddStream(int rank, std::string name);
  int AddDelay(int stream, double seconds, std::string what);
  int AddCompute(int stream, double seconds, double gb_per_s, std::string what);
  // What the stream gets next follows `task`.
  void Follow(int stream, int task, double lag);
  // The task after which everything on the stream so far has ended; kNoTask: there is nothing.
  int Tail(int stream);

  const std::vector<Work>& tasks() const { return tasks_; }
  const std::vector<TaskInfo>& infos() const { return infos_; }
  const std::vector<StreamInfo>& streams() const { return streams_; }

 private:
  struct StreamState {
    int last = kNoTask;
    std::vector<Dependency> pending;
  };
  // Increments of one counter: the tasks that make them, and what waits for them.
  struct CounterState {
    std::vector<Dependency> increments;  // task and the lag until it is seen
    int64_t base = 0;                    // before this call
    int64_t asked = 0;
  };
  using CounterKey = std::tuple<int, int, int, int, int>;  // holder, lane, kind, producer, index
  struct PendingWait {
    int task = 0;
    CounterKey counter;
    int64_t target = 0;
  };
  // The call of one rank that is being translated.
  struct Context {
    const Program* program = nullptr;
    const nccl::Lowered* lowered = nullptr;
    std::vector<int> streams;
    std::vector<int> events;  // the tasks that record them
  };

  static CounterKey KeyOf(int holder, Lane lane, const Counter& counter);
  int StreamOf(int rank, Lane lane, const std::string& name);
  int AddTask(int stream, Overhead overhead, double delay, Flow flow, std::string what);
  void AddCommand(Context* context, const nccl::Command& command);
  void AddCopies(const Context& context, const nccl::Command& command, int stream);
  void AddPitched(const Context& context, const nccl::Command& command, int stream);
  // `copies`: where each goes, and its bytes.
  void AddBatch(int stream, int own, const std::vector<Rates::Access>& copies, bool pitched);
  void AddMemoryOps(const Context& context, const nccl::Command& command, int stream);
  void AddSends(const Context& context, const nccl::Command& command, int stream);
  void AddRailWaits(const Context& context, const nccl::Command& command, int stream);
  void AddSum(const Context& context, const nccl::Command& command, int stream);
  void AddZero(const Context& context, const nccl::Command& command, int stream);
  // Waits of the list that nothing earlier has asked for; the others cost nothing.
  std::vector<PendingWait> Ask(const Context& context, const std::vector<nccl::LoweredSync>& syncs,
                               int first, int count);
  void AddWait(int stream, Overhead overhead, double delay, const std::vector<PendingWait>& waits,
               std::string what);
  void ResolveWaits();

  const Topology topology_;
  const Rates& rates_;
  const std::function<void()> check_interrupt_;
  int64_t commands_ = 0;  // added so far
  std::vector<Work> tasks_;
  std::vector<TaskInfo> infos_;
  std::vector<StreamInfo> streams_;
  std::vector<StreamState> states_;
  std::map<std::tuple<int, int, std::string>, int> stream_index_;
  std::map<std::pair<int, int>, int> rails_;  // rank, lane: the last task of the communicator
  std::map<CounterKey, CounterState> counters_;
  std::vector<PendingWait> waits_;
};

}  // namespace tide::sim

#endif  // TIDE_SIM_TRANSLATE_H_
