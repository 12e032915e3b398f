#include "plan/exhaustive.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tide/error.h"
#include "tide/sizing.h"

namespace tide {
namespace {

using internal::FindOutboxOverlap;
using internal::FindStaleBlock;
using internal::InboxSchedule;
using internal::PlannedInbox;

// Numbers of the paper, appendix D.
TEST(Exhaustive, RejectsTheColliding1023Of8184Pairs) {
  const ExhaustiveResult result = VerifyExhaustive();
  EXPECT_EQ(result.pairs, 8184);
  EXPECT_EQ(result.rejected.size(), 1023U);
  EXPECT_EQ(result.variants, 6);
  EXPECT_EQ(result.accepted_plans, std::vector<int64_t>(4, 7161 * 6));
  EXPECT_EQ(result.rejected_plans, 1023 * 6);
  EXPECT_EQ(result.failed_plans, 0);
  EXPECT_TRUE(result.failures.empty()) << result.failures.front();
}

TEST(Exhaustive, SixtyFourVariantsAPairGiveThePapersCounts) {
  ExhaustiveOptions options;
  options.round_widths.resize(32);
  std::iota(options.round_widths.begin(), options.round_widths.end(), 1);
  options.passes = {1};
  const ExhaustiveResult result = VerifyExhaustive(options);
  EXPECT_EQ(result.accepted_plans, std::vector<int64_t>{458'304});
  EXPECT_EQ(result.rejected_plans, 65'472);
  EXPECT_EQ(result.failed_plans, 0);
}

// The last wave holds the own node and a remote contributor that is a multiple of L; a width that
// divides L never lets that happen.
TEST(Exhaustive, RejectsExactlyTheWidthsThatStraddleAMultipleOfL) {
  size_t expected = 0;
  for (int nodes = 2; nodes <= 1024; ++nodes) {
    for (int width = 1; width <= 8; ++width) {
      const int first = (nodes - 1) / width * width + 1;
      const int multiple = (nodes - 1) / 8 * 8;  // the last one that is remote
      if (multiple >= first) ++expected;
    }
  }
  const ExhaustiveResult result = VerifyExhaustive();
  EXPECT_EQ(result.rejected.size(), expected);
  for (const RejectedPair& pair : result.rejected) {
    EXPECT_NE(8 % pair.wave_width, 0);
    EXPECT_EQ(pair.contributor % 8, 0);
    EXPECT_EQ(pair.other, pair.nodes);
  }
  EXPECT_EQ(result.rejected.front().nodes, 9);
  EXPECT_EQ(result.rejected.front().wave_width, 3);
}

TEST(Exhaustive, RefusesOptionsOutOfRange) {
  EXPECT_THROW(VerifyExhaustive({.max_nodes = 1}), Error);
  EXPECT_THROW(VerifyExhaustive({.local_ranks = 9}), Error);
  EXPECT_THROW(VerifyExhaustive({.round_widths = {0}}), Error);
  EXPECT_THROW(VerifyExhaustive({.passes = {0}}), Error);
}

InboxSchedule Planned(const Topology& topology, int width, int passes) {
  return PlannedInbox(topology, internal::CutIntoWaves(topology, width), passes, 2);
}

TEST(StaleBlocks, AMissingZeroIsFoundInEveryWave) {
  for (const Topology topology : {Topology{9, 8}, Topology{12, 8}, Topology{5, 2}}) {
    for (const int passes : {1, 2}) {
      const InboxSchedule good = Planned(topology, topology.local_ranks, passes);
      ASSERT_TRUE(FindStaleBlock(topology, good).empty());
      for (size_t x = 0; x < good.zeroes.size(); ++x) {
        if (good.zeroes[x] == 0) continue;
        InboxSchedule bad = good;
        bad.zeroes[x] &= bad.zeroes[x] - 1;  // forgets one block
        EXPECT_FALSE(FindStaleBlock(topology, bad).empty()) << "instance " << x;
      }
    }
  }
}

TEST(StaleBlocks, ClearingAPartialIsFound) {
  InboxSchedule bad = Planned({9, 8}, 8, 1);
  bad.zeroes[0] |= bad.writes[0] & -bad.writes[0];
  EXPECT_NE(FindStaleBlock({9, 8}, bad).find("clears a block that it writes"), std::string::npos);
}

// A zero rule that only knows the wave before, whatever its generation, is wrong.
TEST(StaleBlocks, TheGenerationMattersNotTheWaveBefore) {
  const Topology topology{8, 8};
  InboxSchedule bad = Planned(topology, 2, 2);
  for (size_t x = 2; x < bad.writes.size(); ++x) {
    bad.zeroes[x] = bad.writes[x - 1] & ~bad.writes[x];
  }
  EXPECT_FALSE(FindStaleBlock(topology, bad).empty());
}

TEST(OutboxOverlap, OneBlockLessIsFound) {
  for (int nodes = 2; nodes <= 40; ++nodes) {
    for (int width = 1; width <= 8; ++width) {
      for (const int k : {1, 2, 4}) {
        for (const int passes : {1, 2, 3}) {
          const Topology topology{nodes, 8};
          const auto rounds =
              internal::CutIntoRounds(topology, internal::CutIntoWaves(topology, width), k);
          const auto all = static_cast<int>(rounds.size()) * passes;
          int depth = 0;
          for (int i = 0; i < all; ++i) {
            const auto at = [&](int r) { return rounds[static_cast<size_t>(r) % rounds.size()]; };
            depth = std::max(depth, at(i).count + (i > 0 ? at(i - 1).count : 0));
          }
          EXPECT_TRUE(FindOutboxOverlap(rounds, passes, depth).empty());
          EXPECT_FALSE(FindOutboxOverlap(rounds, passes, depth - 1).empty())
              << nodes << ' ' << width << ' ' << k << ' ' << passes;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tide
