// The verifier's mutants run for real: each must end in a wrong result or in an error that names
// what is wrong, unless the table of masked faults says why this fabric can't show it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "run/masked_faults.h"
#include "testing/adversary.h"
#include "testing/fault_cases.h"
#include "testing/faults.h"
#include "verify/mutants.h"

namespace tide {
namespace {

using testing::Adversary;
using testing::Disturbance;
using testing::Fault;
using testing::FaultCase;
using testing::FaultCases;
using testing::kFirstOwnEvent;
using testing::Outcome;
using testing::RunDisturbed;
using testing::Scenario;
using testing::Schedule;
using testing::Subject;
using testing::Turns;
using verify::MutantKind;

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

Subject MakeSubject(const Scenario& scenario) {
  Subject subject{scenario, ExpectedResults(scenario), {}};
  std::mutex mutex;
  Turns turns;
  Disturbance disturbance;
  disturbance.transform = [&](Program program) {
    if (program.lane == Lane::kControl) return program;
    program = ContextsApart(std::move(program));
    const auto variant = static_cast<size_t>(turns.Next(program.rank));
    const std::lock_guard<std::mutex> lock(mutex);
    subject.Record(variant, program);
    return program;
  };
  const Outcome outcome = RunDisturbed(scenario, subject.expected, disturbance);
  EXPECT_TRUE(outcome.clean()) << outcome.Text();
  return subject;
}

Outcome Inject(const Subject& subject, const Fault& fault, const Schedule& schedule,
               std::chrono::nanoseconds quiet) {
  Turns turns;
  Adversary adversary(schedule, subject.scenario.topology.Ranks(), quiet);
  Disturbance disturbance;
  disturbance.transform = [&](Program program) {
    if (program.lane == Lane::kControl) return program;
    const auto variant = static_cast<size_t>(turns.Next(program.rank));
    for (const Program& mutant : fault.programs.at(variant)) {
      if (mutant.rank == program.rank) return mutant;
    }
    return ContextsApart(std::move(program));
  };
  disturbance.may_run = [&](int, const Program& program, const Operation& op) {
    return adversary.MayRun(program, op);
  };
  disturbance.enter = [&](int rank, int) { adversary.Enter(rank); };
  disturbance.differ = [&] { adversary.Stop(); };  // detected
  // Only a lost signal makes anybody wait in vain.
  if (testing::Loses(fault.kind)) disturbance.timeout = std::chrono::milliseconds(300);
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
    if (testing::Loses(fault.kind)) ExpectNamed(outcome, subject.scenario.name);
    return true;
  }
  return false;
}

class Mutants : public ::testing::TestWithParam<FaultCase> {};

TEST_P(Mutants, AreDetected) {
  const auto& [name, kind] = GetParam();
  const Subject& subject = testing::SubjectOf(name, MakeSubject);
  std::vector<Fault> faults = MakeFaults(subject, kind);
  ASSERT_FALSE(faults.empty());
  // Each costs a deadline: the first, the middle and the last one.
  if (testing::Loses(kind) && faults.size() > 3)
    faults = {faults[0], faults[faults.size() / 2], faults.back()};
  testing::Masks masks(testing::MaskedTable(), name, kind);
  for (const Fault& fault : faults) {
    if (Detected(subject, fault, std::chrono::milliseconds(2)) || masks.Take(fault)) continue;
    // The faulty rank may not have got a core in time.
    const bool later = Detected(subject, fault, std::chrono::milliseconds(40)) ||
                       Detected(subject, fault, std::chrono::milliseconds(400));
    EXPECT_TRUE(later) << "neither detected nor masked: " << fault.description;
  }
  EXPECT_EQ(masks.Untaken(), "") << "masked, but detected";
}

INSTANTIATE_TEST_SUITE_P(Fast, Mutants, ::testing::ValuesIn(FaultCases(true)),
                         testing::FaultCaseName);
INSTANTIATE_TEST_SUITE_P(Slow, Mutants, ::testing::ValuesIn(FaultCases(false)),
                         testing::FaultCaseName);

// Every kind that the verifier knows is injected somewhere, in more cases than 41.
TEST(Mutants, OfAllKinds) {
  std::set<MutantKind> kinds = {MutantKind::kSwappedCalls};
  std::vector<FaultCase> cases = FaultCases(true);
  for (const FaultCase& slow : FaultCases(false)) cases.push_back(slow);
  for (const FaultCase& one : cases) kinds.insert(one.second);
  EXPECT_EQ(kinds.size(), static_cast<size_t>(verify::kMutantKinds));
  EXPECT_GT(cases.size(), 41U);
}

}  // namespace
}  // namespace tide
