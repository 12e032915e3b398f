// Faults of the verifier's kinds as tests inject them into real runs: which there are in a
// scenario, which schedules might bring each out, and which may stay undetected.
#ifndef TIDE_TESTS_TESTING_FAULT_CASES_H_
#define TIDE_TESTS_TESTING_FAULT_CASES_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "testing/adversary.h"
#include "testing/faults.h"
#include "testing/scenarios.h"
#include "tide/plan.h"
#include "verify/mutants.h"

namespace tide::testing {

// Events from here on are not the planner's.
inline constexpr int kFirstOwnEvent = 1000;

// The programs of a scenario's calls; a reduce-scatter over nodes has one for each bank. Every rank
// asks for them in this order.
struct Subject {
  Scenario scenario;
  Results expected;
  std::vector<verify::Programs> variants;

  // Notes what the program's rank runs as this variant. One thread at a time.
  void Record(size_t variant, const Program& program) {
    const auto ranks = static_cast<size_t>(scenario.topology.Ranks());
    if (variant >= variants.size()) variants.resize(variant + 1, verify::Programs(ranks));
    variants[variant][static_cast<size_t>(program.rank)] = std::make_shared<const Program>(program);
  }
};

// The subject of a scenario, made once: that takes a run without faults.
inline const Subject& SubjectOf(const std::string& name, Subject (*make)(const Scenario&)) {
  static std::map<std::string, Subject> subjects;
  const auto found = subjects.find(name);
  if (found != subjects.end()) return found->second;
  return subjects.emplace(name, make(ScenarioOf(name))).first->second;
}

// Shared by the ranks of a run: which variant a rank plans now.
class Turns {
 public:
  int Next(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return next_[rank]++;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> next_;
};

// The same mistake in every variant of the program, and the schedules that might bring it out.
struct Fault {
  verify::MutantKind kind{};
  std::string description;
  std::vector<std::vector<Program>> programs;  // by variant: those that replace their ranks'
  std::vector<Schedule> schedules;
};

// The rank with the fault.
inline constexpr int kFaulty = 1;

// The operations that did not wait for what they should have, by their place in the original.
inline std::vector<size_t> Relaxed(const Program& original, const verify::Mutant& mutant) {
  switch (mutant.kind) {
    case verify::MutantKind::kDroppedWait:
    case verify::MutantKind::kWeakenedWait:
    case verify::MutantKind::kDroppedAwait:
    case verify::MutantKind::kDroppedPair:
      return {static_cast<size_t>(mutant.operation)};
    case verify::MutantKind::kDuplicatedPut: {
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
    case verify::MutantKind::kMissingCompletionFence:
    case verify::MutantKind::kEarlyOutboxReuse:
    case verify::MutantKind::kEarlyInboxReuse: {
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

inline std::vector<Schedule> Schedules(const verify::Programs& programs,
                                       const verify::Mutant& mutant) {
  ScheduleFinder finder(programs);
  for (const size_t index : Relaxed(*programs[kFaulty], mutant)) finder.Add(kFaulty, index);
  // What has been signalled too often lets the target go on without this rank.
  if (mutant.kind == verify::MutantKind::kDuplicatedPut) finder.AddLate(kFaulty);
  return finder.Schedules();
}

inline std::vector<Fault> MakeFaults(const Subject& subject, verify::MutantKind kind) {
  std::vector<Fault> faults;
  for (const verify::Programs& programs : subject.variants) {
    std::vector<verify::Mutant> mutants = verify::MakeMutants(kind, programs, kFaulty);
    std::erase_if(mutants, [&](const verify::Mutant& mutant) {
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

inline bool Loses(verify::MutantKind kind) {
  return kind == verify::MutantKind::kLostSignal || kind == verify::MutantKind::kLostCredit;
}

// Compares the faults that were not detected with the table.
class Masks {
 public:
  template <typename Row>
  Masks(const std::vector<Row>& table, const std::string& scenario, verify::MutantKind kind) {
    for (const Row& row : table) {
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
inline verify::Programs Planned(const Scenario& scenario) {
  const int ranks = scenario.topology.Ranks();
  const GroupLayout layout(scenario.name, scenario.Shapes(), ranks);
  CommunicatorOptions options = scenario.Options();
  StagingOptions& staging = options.reduce_scatter.staging;
  if (staging.slot_bytes == 0) staging.slot_bytes = 1 << 20;
  ReduceScatterSpec spec;
  spec.params.resize(layout.params().size());
  std::iota(spec.params.begin(), spec.params.end(), 0);
  spec.grad_dtypes = scenario.dtypes();
  verify::Programs programs;
  for (int rank = 0; rank < ranks; ++rank) {
    programs.push_back(std::make_shared<const Program>(
        scenario.reduces
            ? PlanReduceScatter(layout, spec, scenario.topology, rank, options.reduce_scatter)
            : PlanAllGather(layout, scenario.dtypes(), scenario.topology, rank,
                            options.all_gather)));
  }
  return programs;
}

using FaultCase = std::pair<std::string, verify::MutantKind>;

inline std::vector<FaultCase> FaultCases(bool fast) {
  const std::set<std::string> fast_scenarios = {"gather_2x2_shared", "reduce_2x2_direct"};
  std::vector<FaultCase> cases;
  for (const Scenario& scenario : Scenarios()) {
    if (fast != (fast_scenarios.count(scenario.name) > 0)) continue;
    const verify::Programs programs = Planned(scenario);
    for (int k = 0; k < verify::kMutantKinds; ++k) {
      const auto kind = static_cast<verify::MutantKind>(k);
      if (kind == verify::MutantKind::kSwappedCalls) continue;  // no program: see SwappedCalls
      if (!verify::MakeMutants(kind, programs, kFaulty).empty())
        cases.emplace_back(scenario.name, kind);
    }
  }
  return cases;
}

inline std::string FaultCaseName(const ::testing::TestParamInfo<FaultCase>& info) {
  std::string name = info.param.first + "_" + Name(info.param.second);
  for (char& c : name) {
    if (c == ' ' || c == '-') c = '_';
  }
  return name;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_FAULT_CASES_H_
