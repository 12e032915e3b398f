#include "plan/waves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "tide/error.h"

namespace tide::internal {
namespace {

TEST(Waves, CutAllContributorsInOrder) {
  for (int nodes = 1; nodes <= 40; ++nodes) {
    for (int width = 1; width <= 8; ++width) {
      int next = 1;
      for (const Wave& wave : CutIntoWaves({nodes, 8}, width)) {
        EXPECT_EQ(wave.first, next);
        EXPECT_GE(wave.count, 1);
        EXPECT_LE(wave.count, width);
        next = wave.end();
      }
      EXPECT_EQ(next, nodes + 1);
    }
  }
}

TEST(Rounds, CoverRemoteContributorsOnceInsideTheirWave) {
  for (int nodes = 1; nodes <= 40; ++nodes) {
    for (int width = 1; width <= 8; ++width) {
      for (int k = 1; k <= 5; ++k) {
        const Topology topology{nodes, 8};
        const auto waves = CutIntoWaves(topology, width);
        int next = 1;
        for (const Round& round : CutIntoRounds(topology, waves, k)) {
          const Wave& wave = waves[static_cast<size_t>(round.wave)];
          EXPECT_EQ(round.first, next);
          EXPECT_GE(round.count, 1);
          EXPECT_LE(round.count, k);
          EXPECT_GE(round.first, wave.first);
          EXPECT_LE(round.first + round.count, wave.end());
          next = round.first + round.count;
        }
        EXPECT_EQ(next, nodes) << "the own node needs no transfer";
      }
    }
  }
}

TEST(Rounds, AreNoWiderThanTheirWave) {
  constexpr int kMost = std::numeric_limits<int>::max();
  for (const int nodes : {1, 2, 9, 17}) {
    const Topology topology{nodes, 8};
    EXPECT_EQ(CutIntoWaves(topology, kMost).size(), 1U);
    for (const int width : {8, kMost}) {
      const auto waves = CutIntoWaves(topology, width);
      const auto widest = CutIntoRounds(topology, waves, kMost);
      const auto enough = CutIntoRounds(topology, waves, std::max(1, nodes - 1));
      ASSERT_EQ(widest.size(), enough.size());
      for (size_t i = 0; i < widest.size(); ++i) EXPECT_EQ(widest[i].count, enough[i].count);
    }
  }
}

TEST(Rounds, RefuseNoTransfers) {
  const Topology topology{4, 2};
  EXPECT_THROW(CutIntoRounds(topology, CutIntoWaves(topology, 2), 0), Error);
}

// Equations 7 and 8 are one statement seen from both ends.
TEST(LatinSquare, SenderAndReceiverAgree) {
  for (const Topology topology : {Topology{2, 2}, Topology{9, 8}, Topology{7, 3}, Topology{5, 1}}) {
    for (int c = 1; c <= topology.nodes; ++c) {
      for (int j = 0; j < topology.local_ranks; ++j) {
        EXPECT_EQ(ReceivingLocal(topology, SubSlice(topology, j, c), c), j);
      }
    }
  }
}

TEST(LatinSquare, NamesThePairThatMeets) {
  const Topology topology{9, 8};
  const auto pair = FindCollision(topology, CutIntoWaves(topology, 3));
  EXPECT_EQ(pair, (std::vector<int>{8, 9}));
  for (const int width : {1, 2, 4, 8}) {
    EXPECT_TRUE(FindCollision(topology, CutIntoWaves(topology, width)).empty()) << width;
  }
}

// FindCollision looks at one sub-slice; here every block of the inbox is counted.
TEST(LatinSquare, CollisionMeansTwoPartialsInOneBlock) {
  for (int nodes = 2; nodes <= 40; ++nodes) {
    for (int width = 1; width <= 6; ++width) {
      const Topology topology{nodes, 6};
      const auto waves = CutIntoWaves(topology, width);
      bool collides = false;
      for (const Wave& wave : waves) {
        std::set<std::pair<int, int>> blocks;
        for (int c = wave.first; c < wave.end(); ++c) {
          for (int j = 0; j < 6; ++j) {
            collides |= !blocks.insert({j, SubSlice(topology, j, c)}).second;
          }
        }
      }
      EXPECT_EQ(collides, !FindCollision(topology, waves).empty()) << nodes << ' ' << width;
    }
  }
}

TEST(OutboxDepth, CoversTwoRoundsOfTheRealCut) {
  // Nine nodes, waves of 8: rounds of 4, 4 and none for the own node alone.
  const Topology nine{9, 8};
  EXPECT_EQ(OutboxDepth(nine, RoundsOf(nine, 8, 4), 1, Mode::kSlotReuse), 8);
  // Six nodes, k = 4: rounds of 4 and 1.
  const Topology six{6, 8};
  EXPECT_EQ(OutboxDepth(six, RoundsOf(six, 8, 4), 1, Mode::kSlotReuse), 5);
  // Three nodes, k = 4: one round of 2; twice 2 as soon as it comes twice.
  const Topology three{3, 8};
  EXPECT_EQ(OutboxDepth(three, RoundsOf(three, 8, 4), 1, Mode::kSlotReuse), 2);
  EXPECT_EQ(OutboxDepth(three, RoundsOf(three, 8, 4), 2, Mode::kSlotReuse), 4);
  EXPECT_EQ(OutboxDepth(three, RoundsOf(three, 8, 4), 3, Mode::kInPlace), 6);
}

}  // namespace
}  // namespace tide::internal
