// Several calls of one collective over threads, disturbed by hooks, each compared with a reference.
//
// The hooks also play the caller of a fabric that does not block: sources are overwritten as soon
// as `read_done` is recorded, the result is taken when `done` is, and it must stay until its rank
// enters the next call.
#ifndef TIDE_TESTS_TESTING_FAULTS_H_
#define TIDE_TESTS_TESTING_FAULTS_H_

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "testing/checks.h"
#include "testing/ranks.h"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide::testing {

// Enough that banks, generations and staging slots are used again.
inline constexpr int kCalls = 5;

// A collective, what it works on and how.
struct Scenario {
  std::string name;
  Topology topology;
  bool reduces = false;           // else gathers
  DType dtype = DType::kBF16;     // of shards or gradients
  ReduceScatterOptions reduce{};  // staging.slot_bytes is the bound of a slot
  SegmentKind landing = SegmentKind::kPerRank;

  // The last rank is padded by one row; no transfer is padding alone.
  std::vector<ParamShape> Shapes() const {
    const int ranks = topology.Ranks();
    return MakeShapes({name, {2 * ranks - 1, ranks, 3 * ranks}, 64}, DType::kBF16);
  }
  std::vector<DType> dtypes() const { return std::vector<DType>(Shapes().size(), dtype); }
  CommunicatorOptions Options() const {
    CommunicatorOptions options;
    options.multicast = true;  // where it is there
    options.nodes = topology.nodes;
    options.all_gather.head_bytes = 64 * topology.nodes;
    options.all_gather.min_stripe_bytes = 64;
    options.reduce_scatter = reduce;
    options.reduce_scatter.contexts = 2;
    options.reduce_scatter.min_stripe_bytes = 64;
    return options;
  }
  // Of bytes that no shard fills. A rank can't write to the landing that its node shares.
  char fill() const { return landing == SegmentKind::kNodeShared ? '\0' : kCanary; }
};

// The result of every call, by call and rank.
using Results = std::vector<std::vector<std::vector<char>>>;

inline constexpr float kFaultScale = 0.25F;

// Every call has values of its own.
inline unsigned SeedOf(int call) { return kSeed + 1000U * static_cast<unsigned>(call); }

// What all ranks' landings hold after a call.
inline std::vector<char> ExpectedLanding(const Scenario& scenario, const GroupLayout& layout,
                                         unsigned seed) {
  std::vector<char> expected(static_cast<size_t>(layout.landing_bytes()), scenario.fill());
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto theirs = Shards(layout, scenario.dtype, rank, seed);
    for (size_t p = 0; p < theirs.size(); ++p) {
      const bool same = layout.params()[p].shape.dtype == scenario.dtype;
      const auto landed = same ? theirs[p] : CastToBF16(theirs[p], scenario.dtype);
      std::copy(landed.begin(), landed.end(),
                expected.begin() + layout.LandingOffset(static_cast<int>(p), rank));
    }
  }
  return expected;
}

inline Results ExpectedResults(const Scenario& scenario) {
  const GroupLayout layout(scenario.name, scenario.Shapes(), scenario.topology.Ranks());
  const auto ranks = static_cast<size_t>(scenario.topology.Ranks());
  Results results;
  for (int call = 0; call < kCalls; ++call) {
    if (!scenario.reduces) {
      results.emplace_back(ranks, ExpectedLanding(scenario, layout, SeedOf(call)));
      continue;
    }
    const ReductionReference reference(layout, scenario.topology, scenario.reduce,
                                       scenario.dtypes(), SeedOf(call));
    auto& by_rank = results.emplace_back();
    for (size_t rank = 0; rank < ranks; ++rank) {
      const auto values = reference.Output(static_cast<int>(rank), kFaultScale, nullptr);
      const auto* bytes = reinterpret_cast<const char*>(values.data());
      by_rank.emplace_back(bytes, bytes + values.size() * sizeof(float));
    }
  }
  return results;
}

// What is done to a run. All but the timeout may be empty.
struct Disturbance {
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
  std::function<Program(Program)> transform;
  // As FaultInjection::may_run, with the call of the rank that asks.
  std::function<bool(int call, const Program&, const Operation&)> may_run;
  // Before a rank enters a call.
  std::function<void(int rank, int call)> enter;
  // When a rank has seen a wrong result.
  std::function<void()> differ;
  // When a rank has ended, well or not.
  std::function<void(int rank)> leave;
  bool trace = false;
};

struct Outcome {
  std::vector<std::string> differences;
  std::vector<Error> errors;                                   // at most one a rank
  std::vector<std::pair<int, std::vector<TraceSpan>>> traces;  // with their ranks

  bool clean() const { return differences.empty() && errors.empty(); }
  std::string Text() const {
    std::string text;
    for (const std::string& difference : differences) text += difference + "\n";
    for (const Error& error : errors) text += std::string(error.what()) + "\n";
    return text;
  }
};

// A rank that dies without a word, when thrown by a hook.
struct Killed {};

// One rank's calls.
class Caller {
 public:
  Caller(const Scenario& scenario, const Results& expected, const Disturbance& disturbance,
         int rank)
      : scenario_(scenario), expected_(expected), disturbance_(disturbance), rank_(rank) {}

  FaultInjection Hooks() {
    return {disturbance_.transform,
            [this](const Program& program, const Operation& op) { return MayRun(program, op); }};
  }

  void Run(Communicator& comm) {
    group_ = comm.RegisterGroup(scenario_.name, scenario_.Shapes());
    const GroupLayout& layout = comm.layout(group_);
    std::vector<int> params(layout.params().size());
    std::iota(params.begin(), params.end(), 0);
    comm.Reserve({{group_, params, scenario_.dtypes(), DType::kF32}});
    if (scenario_.reduces) {
      output_.resize(expected_[0][static_cast<size_t>(rank_)].size());
      result_ = output_.data();
      bytes_ = output_.size();
    } else {
      landing_ = comm.AddSegment(layout.landing_bytes(), "landing", scenario_.landing);
      result_ = static_cast<char*>(landing_.address);
      bytes_ = static_cast<size_t>(landing_.bytes);
    }
    if (scenario_.landing == SegmentKind::kPerRank) std::fill(result_, result_ + bytes_, kCanary);
    comm.Barrier();
    for (call_ = 0; call_ < kCalls; ++call_) Call(comm, params);
    Check("long after", call_ - 1, result_);
  }

  std::vector<std::string> differences;

 private:
  bool MayRun(const Program& program, const Operation& op) {
    if (program.lane == Lane::kControl) return true;
    if (disturbance_.may_run && !disturbance_.may_run(call_, program, op)) return false;
    if (op.kind != OpKind::kRecord) return true;
    if (op.event.kind == EventKind::kReadDone) {
      for (auto& source : sources_) std::fill(source.begin(), source.end(), '\x41');
    }
    if (op.event.kind == EventKind::kDone) taken_.assign(result_, result_ + bytes_);
    return true;
  }

  void Call(Communicator& comm, const std::vector<int>& params) {
    if (disturbance_.enter) disturbance_.enter(rank_, call_);
    if (call_ > 0) Check("before the next", call_ - 1, result_);
    // The landing still belongs to the readers of the last call: only an output is cleared.
    if (scenario_.reduces) std::fill(result_, result_ + bytes_, kCanary);
    sources_ = scenario_.reduces
                   ? Gradients(comm.layout(group_), scenario_.dtypes(), rank_, SeedOf(call_))
                   : Shards(comm.layout(group_), scenario_.dtype, rank_, SeedOf(call_));
    taken_.clear();
    if (scenario_.reduces) {
      comm.ReduceScatter({group_, params, Pointers(sources_), scenario_.dtypes(), result_,
                          DType::kF32, kFaultScale, false});
    } else {
      comm.AllGather({group_, Pointers(sources_), scenario_.dtypes(), {landing_.id, 0}});
    }
    Check("done of", call_, taken_.data());
  }

  void Check(const char* when, int call, const char* result) {
    const auto& expected = expected_[static_cast<size_t>(call)][static_cast<size_t>(rank_)];
    if (std::memcmp(result, expected.data(), expected.size()) == 0) return;
    if (disturbance_.differ) disturbance_.differ();
    differences.push_back("rank " + std::to_string(rank_) + ": wrong result, seen " + when +
                          " call " + std::to_string(call));
  }

  const Scenario& scenario_;
  const Results& expected_;
  const Disturbance& disturbance_;
  const int rank_;
  int call_ = 0;
  int group_ = 0;
  SegmentView landing_;
  std::vector<char> output_;
  char* result_ = nullptr;  // of bytes_
  size_t bytes_ = 0;
  std::vector<std::vector<char>> sources_;
  std::vector<char> taken_;
};

inline Outcome RunDisturbed(const Scenario& scenario, const Results& expected,
                            const Disturbance& disturbance) {
  Outcome outcome;
  std::mutex mutex;
  RunRanks(scenario.topology.Ranks(), [&](Bootstrap& bootstrap) {
    Caller caller(scenario, expected, disturbance, bootstrap.rank());
    CommunicatorOptions options = scenario.Options();
    options.timeout = disturbance.timeout;
    options.faults = caller.Hooks();
    Communicator comm(bootstrap, options);
    comm.EnableTrace(disturbance.trace);
    std::vector<Error> errors;
    try {
      caller.Run(comm);
    } catch (const Error& error) {
      errors.push_back(error);
    } catch (const Killed&) {
    }
    if (disturbance.leave) disturbance.leave(bootstrap.rank());
    const std::lock_guard<std::mutex> lock(mutex);
    if (disturbance.trace) outcome.traces.emplace_back(bootstrap.rank(), comm.TakeTrace());
    outcome.errors.insert(outcome.errors.end(), errors.begin(), errors.end());
    outcome.differences.insert(outcome.differences.end(), caller.differences.begin(),
                               caller.differences.end());
  });
  return outcome;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_FAULTS_H_
