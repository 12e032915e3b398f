// Ranks that are late, slow, stalled or dead, and ranks that call in another order: delays never
// change a result, everything else is named.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing/faults.h"
#include "testing/ranks.h"
#include "testing/scenarios.h"

namespace tide {
namespace {

using testing::Disturbance;
using testing::Outcome;
using testing::RunDisturbed;
using testing::Scenario;
using testing::ScenarioOf;
using testing::Scenarios;

constexpr int kFaulty = 1;
constexpr std::chrono::milliseconds kShortDeadline{600};

std::string NameOf(const ::testing::TestParamInfo<std::string>& info) { return info.param; }

std::vector<std::string> ScenarioNames() {
  std::vector<std::string> names;
  for (const Scenario& scenario : Scenarios()) names.push_back(scenario.name);
  return names;
}

std::string Texts(const std::vector<Error>& errors) {
  std::string text;
  for (const Error& error : errors) text += std::string(error.what()) + "\n";
  return text;
}

class Disturbed : public ::testing::TestWithParam<std::string> {
 protected:
  const Scenario scenario_ = ScenarioOf(GetParam());
  const testing::Results expected_ = ExpectedResults(scenario_);
  const int others_ = scenario_.topology.Ranks() - 1;
};

// Whether this is the operation at which the faulty rank fails: in the middle of its third call.
bool IsFaultPoint(int call, const Program& program, const Operation& op) {
  const auto index = static_cast<size_t>(&op - program.operations.data());
  return program.rank == kFaulty && call == 2 && index == program.operations.size() / 2;
}

constexpr int kSeeds = 4;  // a scenario

// Every operation may be held back, which lets the rank's other queues pass it, or hold up its
// rank.
TEST_P(Disturbed, DelaysNeverChangeAResultSlow) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    std::vector<std::mt19937> random;
    for (int rank = 0; rank <= others_; ++rank) {
      random.emplace_back(1000 * seed + static_cast<unsigned>(rank));
    }
    Disturbance disturbance;
    disturbance.may_run = [&](int, const Program& program, const Operation&) {
      const auto draw = random[static_cast<size_t>(program.rank)]() % 64;
      if (draw < 16) std::this_thread::sleep_for(std::chrono::microseconds(draw * 10));
      return draw < 40;
    };
    disturbance.enter = [&](int rank, int) {
      const auto draw = random[static_cast<size_t>(rank)]() % 4;
      std::this_thread::sleep_for(std::chrono::milliseconds(draw));
    };
    const Outcome outcome = RunDisturbed(scenario_, expected_, disturbance);
    EXPECT_TRUE(outcome.clean()) << "seed " << seed << "\n" << outcome.Text();
  }
}

TEST_P(Disturbed, ASlowRankChangesNothingSlow) {
  Disturbance disturbance;
  disturbance.may_run = [](int, const Program& program, const Operation&) {
    if (program.rank == kFaulty) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  };
  const Outcome outcome = RunDisturbed(scenario_, expected_, disturbance);
  EXPECT_TRUE(outcome.clean()) << outcome.Text();
}

// All other ranks end with an error; one of them says that it waited for the faulty one.
void ExpectBlamed(const Outcome& outcome, int others, ErrorCode code) {
  EXPECT_TRUE(outcome.differences.empty()) << outcome.Text();
  EXPECT_GE(static_cast<int>(outcome.errors.size()), others) << outcome.Text();
  EXPECT_TRUE(std::any_of(outcome.errors.begin(), outcome.errors.end(), [&](const Error& error) {
    return error.code() == code && error.context().peer == kFaulty;
  })) << outcome.Text();
}

TEST_P(Disturbed, AStalledRankIsNamedSlow) {
  std::atomic<int> left = 0;
  Disturbance disturbance;
  disturbance.timeout = kShortDeadline;
  disturbance.leave = [&](int) { ++left; };
  disturbance.may_run = [&](int call, const Program& program, const Operation& op) {
    while (IsFaultPoint(call, program, op) && left < others_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  };
  ExpectBlamed(RunDisturbed(scenario_, expected_, disturbance), others_, ErrorCode::kTimeout);
}

// Slower than the deadline allows: from its third call on, an operation takes a third of it.
TEST_P(Disturbed, ATooSlowRankIsNamedSlow) {
  std::atomic<int> left = 0;
  Disturbance disturbance;
  disturbance.timeout = kShortDeadline;
  disturbance.leave = [&](int) { ++left; };
  disturbance.may_run = [&](int call, const Program& program, const Operation&) {
    const bool slow = program.rank == kFaulty && call >= 2 && left < others_;
    if (slow) std::this_thread::sleep_for(kShortDeadline / 3);
    return true;
  };
  ExpectBlamed(RunDisturbed(scenario_, expected_, disturbance), others_, ErrorCode::kTimeout);
}

TEST_P(Disturbed, AKilledRankIsNamed) {
  Disturbance disturbance;
  disturbance.may_run = [](int call, const Program& program, const Operation& op) {
    if (IsFaultPoint(call, program, op)) throw testing::Killed();
    return true;
  };
  const Outcome outcome = RunDisturbed(scenario_, expected_, disturbance);
  ExpectBlamed(outcome, others_, ErrorCode::kPeerDead);
  EXPECT_NE(outcome.Text().find("rank 1 has exited"), std::string::npos) << outcome.Text();
}

INSTANTIATE_TEST_SUITE_P(All, Disturbed, ::testing::ValuesIn(ScenarioNames()), NameOf);

// Each rank gathers or reduces two groups, the faulty one in the other order.
std::vector<Error> SwappedCalls(const Topology& topology, bool reduces) {
  std::mutex mutex;
  std::vector<Error> errors;
  CommunicatorOptions options;
  options.nodes = topology.nodes;
  options.timeout = std::chrono::seconds(30);
  testing::RunCommunicators(topology.Ranks(), options, [&](Communicator& comm) {
    const std::vector<ParamShape> shapes = {{"p", 16, 8, DType::kF32}};
    const std::vector<int> groups = {comm.RegisterGroup("first", shapes),
                                     comm.RegisterGroup("second", shapes)};
    for (const int group : groups) comm.Reserve({{group, {0}, {DType::kF32}, DType::kF32}});
    const SegmentView landing = comm.AddSegment(comm.layout(0).landing_bytes(), "landing");
    const std::vector<float> source(16 * 8, 1.0F);
    std::vector<float> output(16 * 8);
    try {
      for (int turn = 0; turn < 2; ++turn) {
        const int group = groups[static_cast<size_t>(comm.rank() == kFaulty ? 1 - turn : turn)];
        if (reduces) {
          comm.ReduceScatter({group,
                              {0},
                              {source.data()},
                              {DType::kF32},
                              output.data(),
                              DType::kF32,
                              1.0F,
                              false});
        } else {
          comm.AllGather({group, {source.data()}, {DType::kF32}, {landing.id, 0}});
        }
      }
    } catch (const Error& error) {
      const std::lock_guard<std::mutex> lock(mutex);
      errors.push_back(error);
    }
  });
  return errors;
}

class Swapped : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(Swapped, CallsAreAMismatchOnAllRanks) {
  const Topology topology{GetParam().first, GetParam().second};
  for (const bool reduces : {false, true}) {
    const auto errors = SwappedCalls(topology, reduces);
    EXPECT_EQ(static_cast<int>(errors.size()), topology.Ranks()) << Texts(errors);
    for (const Error& error : errors) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
      const std::string text = error.what();
      EXPECT_NE(text.find("of group 'first'"), std::string::npos) << text;
      EXPECT_NE(text.find("of group 'second'"), std::string::npos) << text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Swapped,
                         ::testing::Values(std::pair(1, 2), std::pair(1, 4), std::pair(2, 1),
                                           std::pair(2, 2), std::pair(3, 2), std::pair(2, 4),
                                           std::pair(5, 1), std::pair(9, 1)),
                         [](const auto& shape) {
                           return std::to_string(shape.param.first) + "x" +
                                  std::to_string(shape.param.second);
                         });

// Rank 1 enters its second call only when rank 0, its sibling, and rank 2 have exchanged everything
// in it. Rank 1 would wait in vain, and the test fail, if a round needed the sibling.
TEST(LateSibling, DoesNotDelayTheRoundsOfOthers) {
  constexpr int kLateCall = 1;
  const Scenario scenario = ScenarioOf("gather_2x2");
  const testing::Results expected = ExpectedResults(scenario);
  std::atomic<int> exchanged = 0;
  double entered = 0;
  Disturbance disturbance;
  disturbance.trace = true;
  disturbance.may_run = [&](int call, const Program& program, const Operation& op) {
    const auto is_arrival = [](const Operation& other) {
      return other.kind == OpKind::kWait && other.counter.kind == CounterKind::kArrived;
    };
    const auto& operations = program.operations;
    const auto last = std::find_if(operations.rbegin(), operations.rend(), is_arrival);
    if (call == kLateCall && program.rank % 2 == 0 && &op == &*last) ++exchanged;
    return true;
  };
  disturbance.enter = [&](int rank, int call) {
    if (rank != kFaulty || call != kLateCall) return;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (exchanged < 2 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(exchanged, 2);
    entered =
        std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const Outcome outcome = RunDisturbed(scenario, expected, disturbance);
  EXPECT_TRUE(outcome.clean()) << outcome.Text();
  std::set<int> puts;  // ranks
  for (const auto& [rank, spans] : outcome.traces) {
    for (const TraceSpan& span : spans) {
      // The barrier is call 1.
      if (rank % 2 != 0 || span.call != kLateCall + 2) continue;
      if (span.name.find("put  ") == std::string::npos) continue;
      EXPECT_LT(span.end, entered) << span.name;
      puts.insert(rank);
    }
  }
  EXPECT_EQ(puts, (std::set<int>{0, 2}));
}

}  // namespace
}  // namespace tide
