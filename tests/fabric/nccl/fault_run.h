// A scenario's calls on the fake, with faults in the programs.
//
// A rank has three callers' streams that take turns, each with buffers of its own, so that a call
// and the next two, of which one uses its bank, are under way together. In its stream every call
// follows the writing of its sources, and is followed by a look at its result and by the
// overwriting of the sources; the result is seen once more before the stream's next call.
#ifndef TIDE_TESTS_FABRIC_NCCL_FAULT_RUN_H_
#define TIDE_TESTS_FABRIC_NCCL_FAULT_RUN_H_

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/nccl/drive.h"
#include "fabric/nccl/fake.h"
#include "fabric/nccl/nccl_fabric.h"
#include "testing/adversary.h"
#include "testing/faults.h"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide::testing {

// What a run is like, and what is done to it.
struct FaultRun {
  unsigned seed = 0;
  Order order = Order::kStreams;
  bool multicast = false;
  std::set<int> late;  // ranks whose callers come to every call when nothing else can move
  std::function<Program(Program)> transform;
  // Not empty: if nothing can move any more, wait for a watchdog's report that it accepts.
  std::function<bool(const std::string&)> named;
};

struct FaultOutcome {
  bool ended = false;
  std::vector<std::string> differences;
  std::vector<std::string> errors;
  std::vector<std::string> reports;  // of watchdogs
  bool named = false;                // one of them was accepted

  bool clean() const { return ended && differences.empty() && errors.empty(); }
  std::string Text() const {
    std::string text = ended ? "" : "nothing moves any more\n";
    for (const auto* lines : {&differences, &errors, &reports}) {
      for (const std::string& line : *lines) text += line + "\n";
    }
    return text;
  }
};

// Holds back data operations, by their ordinals: a sum of nothing before each is a pause.
inline Program WithPauses(Program program, const Schedule& schedule) {
  for (size_t i = program.operations.size(); i-- > 0;) {
    if (!MovesData(program.operations[i])) continue;
    if (schedule.held.count({program.rank, DataOrdinal(program, i)}) == 0) continue;
    Operation pause;
    pause.kind = OpKind::kSum;
    pause.queue = program.operations[i].queue;
    pause.sums.emplace_back();
    program.operations.insert(program.operations.begin() + static_cast<std::ptrdiff_t>(i), pause);
  }
  return program;
}

class FaultCaller {
 public:
  // Collective. References outlive the caller.
  FaultCaller(const std::shared_ptr<FakeWorld>& world, Communicator& comm, const Scenario& scenario,
              const Results& expected, bool late)
      : world_(*world),
        comm_(comm),
        scenario_(scenario),
        expected_(expected),
        rank_(static_cast<size_t>(comm.rank())),
        late_(late),
        device_(FakeParts(world, comm.rank())().device) {
    group_ = comm.RegisterGroup(scenario.name, scenario.Shapes());
    params_.resize(comm.layout(group_).params().size());
    std::iota(params_.begin(), params_.end(), 0);
    comm.Reserve({{group_, params_, scenario.dtypes(), DType::kF32}});
    for (Side& side : sides_) {
      side.stream = device_->CreateStream();
      side.sources = Sources(0);
      if (scenario.reduces) {
        side.output.resize(expected[0][rank_].size());
        side.result = side.output.data();
      } else {
        side.landing = comm.AddSegment(comm.layout(group_).landing_bytes(), "landing");
        side.result = static_cast<char*>(side.landing.address);
        std::memset(side.result, scenario.fill(), expected[0][rank_].size());
      }
    }
    comm.Barrier();
  }

  // Enqueues the next call; false if there is none.
  bool Next() {
    if (call_ > kCalls || !error.empty()) return false;
    try {
      call_ < kCalls ? Call(call_) : End();
    } catch (const Error& thrown) {
      error = thrown.what();
    }
    ++call_;
    return true;
  }

  std::vector<std::string> differences;
  std::string error;

 private:
  static constexpr int kSides = 3;
  struct Side {
    nccl::Stream stream = nullptr;
    std::vector<std::vector<char>> sources;
    std::vector<char> output;
    SegmentView landing;
    char* result = nullptr;
  };

  Side& side(int call) { return sides_[static_cast<size_t>(call) % kSides]; }
  std::vector<std::vector<char>> Sources(int call) const {
    const auto rank = static_cast<int>(rank_);
    const GroupLayout& layout = comm_.layout(group_);
    return scenario_.reduces ? Gradients(layout, scenario_.dtypes(), rank, SeedOf(call))
                             : Shards(layout, scenario_.dtype, rank, SeedOf(call));
  }

  void Call(int call) {
    Side& side = this->side(call);
    if (late_) PauseStream(world_, side.stream);
    RunInStream(world_, side.stream, [this, &side, call, values = Sources(call)] {
      if (call >= kSides) Check("before the next", call - kSides);
      // The landing still belongs to the readers of the last call: only an output is cleared.
      if (scenario_.reduces) std::fill(side.output.begin(), side.output.end(), kCanary);
      for (size_t p = 0; p < values.size(); ++p) {
        std::copy(values[p].begin(), values[p].end(), side.sources[p].begin());
      }
    });
    if (scenario_.reduces) {
      comm_.ReduceScatter({group_, params_, Pointers(side.sources), scenario_.dtypes(), side.result,
                           DType::kF32, kFaultScale, false, side.stream});
    } else {
      comm_.AllGather(
          {group_, Pointers(side.sources), scenario_.dtypes(), {side.landing.id, 0}, side.stream});
    }
    RunInStream(world_, side.stream, [this, &side, call] {
      Check("done of", call);
      for (auto& source : side.sources) std::fill(source.begin(), source.end(), '\x41');
    });
  }
  void End() {
    for (int call = kCalls - kSides; call < kCalls; ++call) {
      RunInStream(world_, side(call).stream, [this, call] { Check("long after", call); });
    }
  }
  void Check(const char* when, int call) {
    const auto& expected = expected_[static_cast<size_t>(call)][rank_];
    if (std::memcmp(side(call).result, expected.data(), expected.size()) == 0) return;
    differences.push_back("rank " + std::to_string(rank_) + ": wrong result, seen " + when +
                          " call " + std::to_string(call));
  }

  FakeWorld& world_;
  Communicator& comm_;
  const Scenario& scenario_;
  const Results& expected_;
  const size_t rank_;
  const bool late_;
  const std::unique_ptr<nccl::Device> device_;
  int group_ = 0;
  std::vector<int> params_;
  Side sides_[kSides];
  int call_ = 0;
};

// What the watchdogs of all ranks say.
class Reports {
 public:
  void Add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    texts_.push_back(text);
  }
  std::vector<std::string> Texts() {
    const std::lock_guard lock(mutex_);
    return texts_;
  }
  // Waits for one that is accepted.
  bool Await(const std::function<bool(const std::string&)>& accepted) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (size_t seen = 0; std::chrono::steady_clock::now() < deadline;) {
      for (const auto texts = Texts(); seen < texts.size(); ++seen) {
        if (accepted(texts[seen])) return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

inline FaultOutcome RunFaulty(const Scenario& scenario, const Results& expected,
                              const FaultRun& run) {
  const int ranks = scenario.topology.Ranks();
  const auto world = std::make_shared<FakeWorld>(ranks, run.seed, run.order);
  if (run.multicast) AllowMulticast(*world, scenario.topology.local_ranks);
  std::vector<Host> hosts(static_cast<size_t>(ranks));
  // Also an abandoned fabric's watchdog may have something to say.
  const auto reports = std::make_shared<Reports>();
  FaultOutcome outcome;
  const Meeting meet([&] {
    outcome.ended = Drive(*world, hosts, run.seed);
    if (!outcome.ended && run.named) outcome.named = reports->Await(run.named);
    world->Abandon();
  });
  std::mutex mutex;
  RunRanks(ranks, [&](Bootstrap& bootstrap) {
    const ExpectAbandoned expect;  // of a rank that a fault makes throw
    const int rank = bootstrap.rank();
    CommunicatorOptions options = scenario.Options();
    options.timeout = std::chrono::seconds(60);
    if (run.named) options.timeout = std::chrono::seconds(1);
    options.faults.transform = run.transform;
    const auto expired = [reports](const std::string& text) { reports->Add(text); };
    Communicator comm(
        std::make_unique<nccl::NcclFabric>(bootstrap, options, FakeParts(world, rank), expired),
        options);
    FaultCaller caller(world, comm, scenario, expected, run.late.count(rank) > 0);
    hosts[static_cast<size_t>(rank)] = [&caller] { return caller.Next(); };
    meet(bootstrap);
    const std::lock_guard lock(mutex);
    outcome.differences.insert(outcome.differences.end(), caller.differences.begin(),
                               caller.differences.end());
    if (!caller.error.empty()) outcome.errors.push_back(caller.error);
  });
  outcome.reports = reports->Texts();
  return outcome;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_FAULT_RUN_H_
