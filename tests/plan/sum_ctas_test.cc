// Which of the measured numbers of CTAs a sum takes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plan/sizing.h"
#include "tide/error.h"
#include "tide/machine.h"

namespace tide {
namespace {

constexpr int64_t kBf16 = 2;
constexpr int64_t kFp32 = 4;

// 100 GB/s a CTA up to 32 CTAs, for any number of sources; all add the same.
MachineModel Calibrated() {
  MachineModel machine = MachinePreset("h200");
  machine.nvlink_gb_per_s = 100;
  machine.nic_gb_per_s = 100;
  machine.sum_gb_per_s = 100;
  machine.sum_curves = {{2, {{1, 100}, {32, 3200}, {64, 3200}}}};
  for (const int ctas : {1, 4, 8, 16, 32, 64}) machine.sum_added.push_back({ctas, 1.0, 0.01});
  return machine;
}

void SetAdded(MachineModel* machine, int ctas, double ms) {
  for (AddedTime& added : machine->sum_added) {
    if (added.ctas == ctas) added.ms = ms;
  }
}

int CtasOf(const MachineModel& machine, const Topology& topology, int64_t grad_item = kBf16) {
  return internal::ChooseSumCtas(machine, topology, grad_item).value;
}

std::string WhyOf(const MachineModel& machine, const Topology& topology) {
  return internal::ChooseSumCtas(machine, topology, kBf16).why;
}

// On one node (L b + 4) / ((L - 1) b) bytes are read and written for each that arrives.
TEST(SumCtas, NeedsFollowFromWhatArrives) {
  const MachineModel machine = Calibrated();  // with a reserve of 1.5
  EXPECT_DOUBLE_EQ(internal::NeededSumGbPerS(machine, {1, 2}, kBf16), 600);
  EXPECT_DOUBLE_EQ(internal::NeededSumGbPerS(machine, {1, 2}, kFp32), 450);
  EXPECT_DOUBLE_EQ(internal::NeededSumGbPerS(machine, {1, 8}, kBf16), 150 * 20.0 / 14);
  // Equation 13: L b / 4 + 1 bytes for each of the rail.
  EXPECT_DOUBLE_EQ(internal::NeededSumGbPerS(machine, {2, 8}, kBf16), 750);
  EXPECT_DOUBLE_EQ(internal::NeededSumGbPerS(machine, {2, 8}, kFp32), 1350);
  EXPECT_EQ(internal::NeededSumGbPerS(machine, {1, 1}, kBf16), 0);
}

TEST(SumCtas, TheLeastThatKeepsUp) {
  const MachineModel machine = Calibrated();
  EXPECT_EQ(CtasOf(machine, {1, 2}), 8);         // 600 GB/s
  EXPECT_EQ(CtasOf(machine, {1, 2}, kFp32), 8);  // 450
  EXPECT_EQ(CtasOf(machine, {1, 8}), 4);         // 214
  MachineModel faster = machine;
  faster.nvlink_gb_per_s = 250;
  EXPECT_EQ(CtasOf(faster, {1, 2}), 16);  // 1500
  faster.nvlink_gb_per_s = 800.0 / 6;
  EXPECT_EQ(CtasOf(faster, {1, 2}), 8);  // 800, exactly what 8 reach
}

TEST(SumCtas, MoreWhereTheyAddLess) {
  MachineModel machine = Calibrated();
  SetAdded(&machine, 32, 0.5);
  EXPECT_EQ(CtasOf(machine, {1, 2}), 32);
  const std::string why = WhyOf(machine, {1, 2});
  EXPECT_NE(why.find("adds 0.500 ms; 8 CTAs keep up, too, and add 1.000 ms"), std::string::npos)
      << why;
  // What does not keep up is not asked.
  SetAdded(&machine, 4, 0.1);
  EXPECT_EQ(CtasOf(machine, {1, 2}), 32);
}

TEST(SumCtas, FewerWithinNoise) {
  MachineModel machine = Calibrated();
  SetAdded(&machine, 64, 0.99);  // the noise of a difference is 0.014
  EXPECT_EQ(CtasOf(machine, {1, 2}), 8);
  const std::string why = WhyOf(machine, {1, 2});
  EXPECT_NE(why.find("64 CTAs add 0.990 ms, no less beyond noise"), std::string::npos) << why;
  SetAdded(&machine, 64, 0.98);
  EXPECT_EQ(CtasOf(machine, {1, 2}), 64);
  SetAdded(&machine, 16, 0.985);
  EXPECT_EQ(CtasOf(machine, {1, 2}), 16);
}

TEST(SumCtas, AlmostTheFastestIfNoneKeepsUp) {
  MachineModel machine = Calibrated();
  machine.nvlink_gb_per_s = 1000;
  SetAdded(&machine, 64, 0.1);
  EXPECT_EQ(CtasOf(machine, {1, 2}), 32);  // 64 are no faster
  const std::string why = WhyOf(machine, {1, 2});
  EXPECT_NE(why.find("none keeps up (6000 GB/s of sums for 1000 GB/s of links): the fewest"),
            std::string::npos)
      << why;
}

TEST(SumCtas, SeveralNodesTakeEquationThirteenAtLeast) {
  MachineModel machine = Calibrated();
  EXPECT_EQ(CtasOf(machine, {2, 8}), 8);  // 750 GB/s
  // One CTA alone is slower than its part of many: equation 13 asks for 19.
  machine.sum_gb_per_s = 40;
  EXPECT_EQ(internal::SumCtas(machine, {2, 8}, kBf16), 19);
  EXPECT_EQ(CtasOf(machine, {2, 8}), 32);
  EXPECT_EQ(CtasOf(machine, {1, 2}), 8);  // one node has no rail
  // An expert lane: (7 b/4 + 2) / (7 b/4) bytes at 100 GB/s of rail.
  machine.sum_gb_per_s = 100;
  EXPECT_EQ(CtasOf(machine, {8, 1}), 4);
}

TEST(SumCtas, NothingMeasuredIsRefused) {
  MachineModel machine = MachinePreset("h200");
  for (const bool curves : {true, false}) {
    if (!curves) {
      machine = Calibrated();
      machine.sum_curves.clear();
    }
    try {
      CtasOf(machine, {1, 2});
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("expected sum_curves and sum_added"),
                std::string::npos)
          << error.what();
    }
  }
}

// What an H200 measures (bench/results): a quarter keeps up with the links of two, a sixteenth
// does not quite with those of eight.
TEST(SumCtas, OnTheCurvesOfAnH200) {
  MachineModel machine = MachinePreset("h200");
  for (const int ctas : {1, 8, 16, 33, 49, 66, 132}) machine.sum_added.push_back({ctas, 0.5, 0.02});
  EXPECT_EQ(CtasOf(machine, {1, 2}), 33);
  EXPECT_EQ(CtasOf(machine, {1, 8}), 16);
}

TEST(SumCtas, AddedTimesAreReadAndWritten) {
  const MachineModel machine = MachineFromJson(
      R"({"base": "h200", "sum_ctas": 16, "sum_added": [[1, -0.25, 0.5], [16, 1, 0]],
          "sources": {"sum_ctas": "why", "sum_added": "how"}})");
  ASSERT_EQ(machine.sum_added.size(), 2U);
  EXPECT_EQ(machine.sum_added[0].ctas, 1);
  EXPECT_EQ(machine.sum_added[0].ms, -0.25);
  EXPECT_EQ(machine.sum_added[0].noise_ms, 0.5);
  EXPECT_EQ(machine.sum_ctas, 16);
  EXPECT_EQ(machine.sources.at("sum_added"), "how");
  EXPECT_EQ(ToJson(MachineFromJson(ToJson(machine))), ToJson(machine));
  for (const char* bad : {"[[1, 1]]", "[[2, 1, 0], [2, 1, 0]]", "[[0, 1, 0]]", "[[1, 1, -1]]"}) {
    EXPECT_THROW(MachineFromJson(R"({"base": "h200", "sum_added": )" + std::string(bad) + "}"),
                 Error)
        << bad;
  }
}

}  // namespace
}  // namespace tide
