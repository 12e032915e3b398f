// The verifier's mutants run on the fake: each must end in a wrong result or in streams that wait
// for ever, unless the table of masked faults says why streams can't show it.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fabric/nccl/fault_run.h"
#include "fabric/nccl/masked_faults.h"
#include "testing/fault_cases.h"

namespace tide {
namespace {

using testing::Fault;
using testing::FaultCase;
using testing::FaultOutcome;
using testing::FaultRun;
using testing::Order;
using testing::Scenario;
using testing::Schedule;
using testing::Subject;
using testing::Turns;
using verify::MutantKind;

// The programs of a scenario, from a run without faults.
Subject MakeSubject(const Scenario& scenario) {
  Subject subject{scenario, ExpectedResults(scenario), {}};
  Turns turns;
  FaultRun run;
  run.transform = [&](Program program) {
    if (program.lane == Lane::kControl) return program;
    const auto variant = static_cast<size_t>(turns.Next(program.rank));
    subject.Record(variant, program);
    return program;
  };
  const FaultOutcome outcome = RunFaulty(scenario, subject.expected, run);
  EXPECT_TRUE(outcome.clean()) << outcome.Text();
  return subject;
}

FaultOutcome Inject(const Subject& subject, const Fault& fault, const Schedule& schedule,
                    FaultRun run) {
  Turns turns;
  run.late = schedule.late;
  run.transform = [&](Program program) {
    if (program.lane == Lane::kControl) return program;
    const auto variant = static_cast<size_t>(turns.Next(program.rank));
    for (const Program& mutant : fault.programs.at(variant)) {
      if (mutant.rank == program.rank) program = mutant;
    }
    return WithPauses(std::move(program), schedule);
  };
  return RunFaulty(subject.scenario, subject.expected, run);
}

// Seeds a schedule, for a start, and for what is not masked.
constexpr unsigned kSeeds = 6;
constexpr unsigned kMostSeeds = 400;

// Also where a communicator runs its operations in any order: no program counts on NCCL's.
bool Detected(const Subject& subject, const Fault& fault, unsigned first, unsigned end,
              bool multicast) {
  for (unsigned seed = first; seed < end; ++seed) {
    for (const Schedule& schedule : fault.schedules) {
      for (const Order order : {Order::kStreams, Order::kUnordered}) {
        FaultRun run;
        run.seed = seed;
        run.order = order;
        run.multicast = multicast;
        if (!Inject(subject, fault, schedule, run).clean()) return true;
      }
    }
  }
  return false;
}

// A lost signal leaves streams that wait for ever; a watchdog says who waits for what, in which
// call.
void ExpectNamed(const Subject& subject, const Fault& fault) {
  FaultRun run;
  run.named = [&](const std::string& report) {
    return report.find("of group '" + subject.scenario.name + "'") != std::string::npos &&
           report.find(" of rank " + std::to_string(testing::kFaulty) + " to reach") !=
               std::string::npos;
  };
  const FaultOutcome outcome = Inject(subject, fault, {}, run);
  EXPECT_FALSE(outcome.ended) << fault.description;
  EXPECT_TRUE(outcome.named) << fault.description << "\n" << outcome.Text();
}

void ExpectDetected(const FaultCase& fault_case, bool multicast) {
  const auto& [name, kind] = fault_case;
  const Subject& subject = testing::SubjectOf(name, MakeSubject);
  const std::vector<Fault> faults = MakeFaults(subject, kind);
  ASSERT_FALSE(faults.empty());
  testing::Masks masks(testing::NcclMaskedTable(), name, kind);
  for (const Fault& fault : faults) {
    if (Detected(subject, fault, 0, kSeeds, multicast) || masks.Take(fault)) continue;
    EXPECT_TRUE(Detected(subject, fault, kSeeds, kMostSeeds, multicast))
        << "neither detected nor masked: " << fault.description;
  }
  if (testing::Loses(kind)) ExpectNamed(subject, faults.front());
  EXPECT_EQ(masks.Untaken(), "") << "masked, but detected";
}

class NcclMutants : public ::testing::TestWithParam<FaultCase> {};

TEST_P(NcclMutants, AreDetected) { ExpectDetected(GetParam(), /*multicast=*/false); }

INSTANTIATE_TEST_SUITE_P(Fast, NcclMutants, ::testing::ValuesIn(testing::FaultCases(true)),
                         testing::FaultCaseName);
INSTANTIATE_TEST_SUITE_P(Slow, NcclMutants, ::testing::ValuesIn(testing::FaultCases(false)),
                         testing::FaultCaseName);

class NcclMulticastMutants : public NcclMutants {};

TEST_P(NcclMulticastMutants, AreDetected) { ExpectDetected(GetParam(), /*multicast=*/true); }

std::vector<FaultCase> CasesOf(bool fast, const std::set<std::string>& scenarios) {
  std::vector<FaultCase> cases = testing::FaultCases(fast);
  std::erase_if(cases, [&](const FaultCase& c) { return scenarios.count(c.first) == 0; });
  return cases;
}

// Those whose operations reach a whole node.
INSTANTIATE_TEST_SUITE_P(Fast, NcclMulticastMutants,
                         ::testing::ValuesIn(CasesOf(true, {"gather_2x2_shared"})),
                         testing::FaultCaseName);
INSTANTIATE_TEST_SUITE_P(Slow, NcclMulticastMutants,
                         ::testing::ValuesIn(CasesOf(false, {"gather_1x4", "reduce_2x2_latin",
                                                             "reduce_2x4_latin"})),
                         testing::FaultCaseName);

}  // namespace
}  // namespace tide
