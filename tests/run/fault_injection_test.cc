// The verifier's mutants run for real: each must end in a wrong result or in an error that names
// what is wrong, unless the table of masked faults says why this fabric can't show it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "run/masked_faults.h"
#include "testing/adversary.h"
#include "testing/faults.h"
#include "testing/scenarios.h"
#include "verify/mutants.h"

namespace tide {
namespace {

using testing::Adversary;
using testing::Disturbance;
using testing::MaskedFaults;
using testing::Outcome;
using testing::RunDisturbed;
using testing::Scenario;
using testing::ScenarioOf;
using testing::Scenarios;
using testing::Schedule;
using testing::ScheduleFinder;
using verify::Mutant;
using verify::MutantKind;
using verify::Programs;

// Events from here on are not the planner's.
constexpr int kFirstOwnEvent = 1000;

// A queue for each context and an operation for each piece, so that each can be held back, and
// changed, by itself and those of other contexts overtake it, as on a network. The put's own queue
// waits for all of them.
Program ContextsApart(Program program) {
  std::vector<Operation> operations;
  std::map<int, int> queues;  // by context
  int events = kFirstOwnEvent;
  const auto add = [&](int queue, OpKind kind) -> Operation& {
    Operation& op = operations.emplace_back();
    op.queue = queue;
    op.kind = kind;
    return op;
  };
  for (Operation& op : program.operations) {
    if (op.puts.size() <= 1) {
      operations.push_back(std::move(op));
      continue;
    }
    const Event issued{EventKind::kLocal, events++};
    add(op.queue, OpKind::kRecord).event = issued;
    const std::vector<PutPiece> pieces = std::exchange(op.puts, {});
    for (size_t i = 0; i < pieces.size(); ++i) {
      const int context = pieces[i].context;
      const auto [found, added] =
          queues.try_emplace(context, static_cast<int>(program.queues.size()));
      if (added) program.queues.push_back("context " + std::to_string(context));
      add(found->second, OpKind::kAwait).event = issued;
      operations.push_back(op);
      operations.back().queue = found->second;
      operations.back().puts = {pieces[i]};
      add(found->second, OpKind::kRecord).event = {EventKind::kLocal, events + static_cast<int>(i)};
    }
    for (size_t i = 0; i < pieces.size(); ++i) {
      add(op.queue, OpKind::kAwait).event = {EventKind::kLocal, events++};
    }
  }
  program.operations = std::move(operations);
  return program;
}

// The programs of a scenario's calls; a reduce-scatter over nodes has one for each bank. Every rank
// asks for them in this order.
struct Subject {
  Scenario scenario;
  testing::Results expected;
  std::vector<Programs> variants;
};

// Shared by the ranks of a run: which variant a rank plans now.
class Order {
 public:
  int Next(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return next_[rank]++;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> next_;
};

Subject MakeSubject(const Scenario& scenario) {
  Subject subject{scenario, ExpectedResults(scenario), {}};
  const auto ranks = static_cast<size_t>(scenario.topology.Ranks());
  std::mutex mutex;
  Order order;
  Disturbance disturbance;
  disturbance.transform = [&](Program program) {
    if (program.lane == Lane::kControl) return program;
    program = ContextsApart(std::move(program));
    const auto variant = static_cast<size_t>(order.Next(program.rank));
    const std::lock_guard<std::mutex> lock(mutex);
    if (variant >= subject.variants.size()) subject.variants.resize(variant + 1, Programs(ranks));
    subject.variants[variant][static_cast<size_t>(program.rank)] =
        std::make_shared<const Program>(program);
    return program;
  };
  const Outcome outcome = RunDisturbed(scenario, subject.expected, disturbance);
  EXPECT_TRUE(outcome.clean()) << outcome.Text();
  return subject;
}

const Subject& SubjectOf(const std::string& name) {
  static std::map<std::string, Subject> subjects;
  const auto found = subjects.find(name);
  if (found != subjects.end()) return found->second;
  return subjects.emplace(name, MakeSubject(ScenarioOf(name))).first->second;
}

// The same mistake in every variant of the program, and the schedules that might bring it out.
struct Fault {
  MutantKind kind{};
  std::string description;
  std::vector<std::vector<Program>> programs;  // by variant: those that replace their ranks'
  std::vector<Schedule> schedules;
};

// The rank with the fault.
constexpr int kFaulty = 1;

// The operations that did not wait for what they should have, by their place in the original.
std::vector<size_t> Relaxed(const Program& original, const Mutant& mutant) {
  switch (mutant.kind) {
    case MutantKind::kDroppedWait:
    case MutantKind::kWeakenedWait:
    case MutantKind::kDroppedAwait:
    case MutantKind::kDroppedPair:
      return {static_cast<size_t>(mutant.operation)};
    case MutantKind::kDuplicatedPut: {
      // The target's next wait on the counter ends before the last put to it has come.
      const auto first = static_cast<size_t>(mutant.operation);
      const Operation& put = original.operations[first];
      size_t last = first;
      for (size_t i = first; i < original.operations.size(); ++i) {
        const Operation& op = original.operations[i];
        const bool same = op.kind == OpKind::kPut && op.peer == put.peer &&
                          op.puts[0].signal == put.puts[0].signal &&
                          op.puts[0].signal_index == put.puts[0].signal_index;
        if (same) last = i;
      }
      return {first, last};
    }
    case MutantKind::kMissingCompletionFence:
    case MutantKind::kEarlyOutboxReuse:
    case MutantKind::kEarlyInboxReuse: {
      std::vector<size_t> dropped;
      const std::vector<Operation>& rest = mutant.programs[0].operations;
      for (size_t i = 0; i < original.operations.size(); ++i) {
        const size_t at = i - dropped.size();
        const bool kept = at < rest.size() && ToString(original, original.operations[i]) ==
                                                  ToString(original, rest[at]);
        if (!kept) dropped.push_back(i);
      }
      return dropped;
    }
    default:
      return {};
  }
}

std::vector<Schedule> Schedules(const Programs& programs, const Mutant& mutant) {
  ScheduleFinder finder(programs);
  for (const size_t index : Relaxed(*programs[kFaulty], mutant)) finder.Add(kFaulty, index);
  // What has been signalled too often lets the target go on without this rank.
  if (mutant.kind == MutantKind::kDuplicatedPut) finder.AddLate(kFaulty);
  return finder.Schedules();
}

std::vector<Fault> MakeFaults(const Subject& subject, MutantKind kind) {
  std::vector<Fault> faults;
  for (const Programs& programs : subject.variants) {
    std::vector<Mutant> mutants = MakeMutants(kind, programs, kFaulty);
    std::erase_if(mutants, [&](const Mutant& mutant) {
      return mutant.operation >= 0 &&
             programs[kFaulty]->operations[static_cast<size_t>(mutant.operation)].event.index >=
                 kFirstOwnEvent;
    });
    EXPECT_TRUE(faults.empty() || faults.size() == mutants.size());
    faults.resize(std::max(faults.size(), mutants.size()));
    for (size_t i = 0; i < mutants.size(); ++i) {
      Fault& fault = faults[i];
      if (fault.programs.empty()) {
        fault.kind = kind;
        fault.description = mutants[i].description;
        fault.schedules = Schedules(programs, mutants[i]);
      }
      fault.programs.push_back(mutants[i].programs);
    }
  }
  return faults;
}

bool Loses(MutantKind kind) {
  return kind == MutantKind::kLostSignal || kind == MutantKind::kLostCredit;
}

Outcome Inject(const Subject& subject, const Fault& fault, const Schedule& schedule,
               std::chrono::nanoseconds quiet) {
  Order order;
  Adversary adversary(schedule, subject.scenario.topology.Ranks(), quiet);
  Disturbance disturbance;
  disturbance.transform = [&](Program program) {
    if (program.lane == Lane::kControl) return program;
    const auto variant = static_cast<size_t>(order.Next(program.rank));
    for (const Program& mutant : fault.programs.at(variant)) {
      if (mutant.rank == program.rank) return mutant;
    }
    return ContextsApart(std::move(program));
  };
  disturbance.may_run = [&](int, const Program& program, const Operation& op) {
    return adversary.MayRun(program, op);
  };
  disturbance.enter = [&](int rank, int) { adversary.Enter(rank); };
  // Only a lost signal makes anybody wait in vain.
  if (Loses(fault.kind)) disturbance.timeout = std::chrono::milliseconds(300);
  return RunDisturbed(subject.scenario, subject.expected, disturbance);
}

// A lost signal ends in a timeout that names who waited for whom, in which call.
void ExpectNamed(const Outcome& outcome, const std::string& group) {
  const bool named =
      std::any_of(outcome.errors.begin(), outcome.errors.end(), [&](const Error& error) {
        return error.code() == ErrorCode::kTimeout && error.context().rank >= 0 &&
               error.context().peer >= 0 && error.context().group == group &&
               std::string(error.what()).find("' signal in call ") != std::string::npos;
      });
  EXPECT_TRUE(named) << outcome.Text();
}

bool Detected(const Subject& subject, const Fault& fault, std::chrono::milliseconds quiet) {
  for (const Schedule& schedule : fault.schedules) {
    const Outcome outcome = Inject(subject, fault, schedule, quiet);
    if (outcome.clean()) continue;
    if (Loses(fault.kind)) ExpectNamed(outcome, subject.scenario.name);
    return true;
  }
  return false;
}

// Compares the faults that were not detected with the table.
class Masks {
 public:
  Masks(const std::string& scenario, MutantKind kind) {
    for (MaskedFaults& row : testing::MaskedTable()) {
      if (!row.scenario.empty() && row.scenario != scenario) continue;
      for (const auto& [of, count] : row.counts) {
        if (of == kind && count != 0) left_.emplace_back(row.operation, count);
      }
    }
  }
  // Takes one from the row that the fault belongs to; false if no row has room for it.
  bool Take(const Fault& fault) {
    for (auto& [operation, count] : left_) {
      if (count == 0 || fault.description.find(operation) == std::string::npos) continue;
      if (count > 0) --count;
      return true;
    }
    return false;
  }
  // Masked faults that were detected after all.
  std::string Untaken() const {
    std::string rows;
    for (const auto& [operation, count] : left_) {
      if (count > 0) rows += operation + ", " + std::to_string(count) + "; ";
    }
    return rows;
  }

 private:
  std::vector<std::pair<std::string, int>> left_;
};

// The programs as planned here, to find out which faults there are.
Programs Planned(const Scenario& scenario) {
  const int ranks = scenario.topology.Ranks();
  const GroupLayout layout(scenario.name, scenario.Shapes(), ranks);
  CommunicatorOptions options = scenario.Options();
  StagingOptions& staging = options.reduce_scatter.staging;
  if (staging.slot_bytes == 0) staging.slot_bytes = 1 << 20;
  ReduceScatterSpec spec;
  spec.params.resize(layout.params().size());
  std::iota(spec.params.begin(), spec.params.end(), 0);
  spec.grad_dtypes = scenario.dtypes();
  Programs programs;
  for (int rank = 0; rank < ranks; ++rank) {
    programs.push_back(std::make_shared<const Program>(
        scenario.reduces
            ? PlanReduceScatter(layout, spec, scenario.topology, rank, options.reduce_scatter)
            : PlanAllGather(layout, scenario.dtypes(), scenario.topology, rank,
                            options.all_gather)));
  }
  return programs;
}

using Case = std::pair<std::string, MutantKind>;

std::vector<Case> Cases(bool fast) {
  const std::set<std::string> fast_scenarios = {"gather_2x2_shared", "reduce_2x2_direct"};
  std::vector<Case> cases;
  for (const Scenario& scenario : Scenarios()) {
    if (fast != (fast_scenarios.count(scenario.name) > 0)) continue;
    const Programs programs = Planned(scenario);
    for (int k = 0; k < verify::kMutantKinds; ++k) {
      const auto kind = static_cast<MutantKind>(k);
      if (kind == MutantKind::kSwappedCalls) continue;  // no program: see SwappedCalls
      if (!MakeMutants(kind, programs, kFaulty).empty()) cases.emplace_back(scenario.name, kind);
    }
  }
  return cases;
}

class Mutants : public ::testing::TestWithParam<Case> {};

TEST_P(Mutants, AreDetected) {
  const auto& [name, kind] = GetParam();
  const Subject& subject = SubjectOf(name);
  std::vector<Fault> faults = MakeFaults(subject, kind);
  ASSERT_FALSE(faults.empty());
  // Each costs a deadline: the first, the middle and the last one.
  if (Loses(kind) && faults.size() > 3)
    faults = {faults[0], faults[faults.size() / 2], faults.back()};
  Masks masks(name, kind);
  for (const Fault& fault : faults) {
    if (Detected(subject, fault, std::chrono::milliseconds(2)) || masks.Take(fault)) continue;
    // The faulty rank may not have got a core in time.
    const bool later = Detected(subject, fault, std::chrono::milliseconds(40)) ||
                       Detected(subject, fault, std::chrono::milliseconds(400));
    EXPECT_TRUE(later) << "neither detected nor masked: " << fault.description;
  }
  EXPECT_EQ(masks.Untaken(), "") << "masked, but detected";
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.first + "_" + Name(info.param.second);
  for (char& c : name) {
    if (c == ' ' || c == '-') c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Fast, Mutants, ::testing::ValuesIn(Cases(true)), CaseName);
INSTANTIATE_TEST_SUITE_P(Slow, Mutants, ::testing::ValuesIn(Cases(false)), CaseName);

// Every kind that the verifier knows is injected somewhere, in more cases than 41.
TEST(Mutants, OfAllKinds) {
  std::set<MutantKind> kinds = {MutantKind::kSwappedCalls};
  std::vector<Case> cases = Cases(true);
  for (const Case& slow : Cases(false)) cases.push_back(slow);
  for (const Case& one : cases) kinds.insert(one.second);
  EXPECT_EQ(kinds.size(), static_cast<size_t>(verify::kMutantKinds));
  EXPECT_GT(cases.size(), 41U);
}

}  // namespace
}  // namespace tide
