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

// The default options, checked once.
const ExhaustiveResult& Default() {
  static const ExhaustiveResult result = VerifyExhaustive();
  return result;
}

// Numbers of the paper, appendix D.
TEST(Exhaustive, RejectsTheColliding1023Of8184Pairs) {
  const ExhaustiveResult& result = Default();
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
  const ExhaustiveResult& result = Default();
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

TEST(Exhaustive, GivesUpWhenAsked) {
  struct Enough {};
  int asked = 0;
  ExhaustiveOptions options;
  options.check_interrupt = [&] {
    if (++asked == 100) throw Enough();
  };
  EXPECT_THROW(VerifyExhaustive(options), Enough);
  EXPECT_EQ(asked, 100);
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

// What the planner's programs do to the inboxes of node 0, gathered from all ranks.
InboxSchedule FromPrograms(const Topology& topology, int width, int passes) {
  const int L = topology.local_ranks;
  const GroupLayout layout("g", {{"p", 192 * L * topology.Ranks(), 1, DType::kBF16}},
                           topology.Ranks());
  const ReduceScatterSpec spec{.params = {0}, .grad_dtypes = {DType::kBF16}};
  ReduceScatterOptions options;
  options.placement = Placement::kLatinSquare;
  options.wave_width = width;
  options.passes = passes;
  options.staging.slot_bytes = 4096;
  const auto waves = static_cast<size_t>((topology.nodes + width - 1) / width);
  InboxSchedule schedule;
  schedule.generations = ReduceScatterRegions(layout, spec, topology, options).generations;
  schedule.writes.resize(waves * static_cast<size_t>(passes));
  schedule.zeroes.resize(schedule.writes.size());
  const auto mark = [&](std::vector<internal::BlockMask>& masks, size_t x, int local,
                        const Program& program, const Ref& dst) {
    const Buffer& buffer = program.buffers[static_cast<size_t>(dst.buffer)];
    ASSERT_EQ(buffer.kind, BufferKind::kInbox);
    ASSERT_EQ(buffer.index, static_cast<int>(x) % schedule.generations);
    masks[x] |= internal::BlockMask{1} << (local * L + dst.offset / (buffer.bytes / L));
  };
  for (int rank = 0; rank < topology.Ranks(); ++rank) {
    const Program program = PlanReduceScatter(layout, spec, topology, rank, options);
    size_t landed = 0;
    int sent = 0;
    for (const Operation& op : program.operations) {
      if (op.kind == OpKind::kPut) {
        const int c = sent % (topology.nodes - 1) + 1;
        const size_t x = static_cast<size_t>(sent / (topology.nodes - 1)) * waves +
                         static_cast<size_t>((c - 1) / width);
        ++sent;
        if (topology.Node(op.peer) == 0) {
          mark(schedule.writes, x, topology.Local(op.peer), program, op.puts[0].dst);
        }
      }
      if (topology.Node(rank) != 0) continue;
      const bool own = op.kind == OpKind::kCopy && op.peer == rank;
      if (own || op.kind == OpKind::kZero) {
        for (const Piece& piece : op.pieces) {
          mark(own ? schedule.writes : schedule.zeroes, landed, topology.Local(rank), program,
               piece.dst);
        }
      }
      landed += op.kind == OpKind::kLand ? 1 : 0;
    }
  }
  return schedule;
}

TEST(Exhaustive, SimulatesWhatThePlannerPlans) {
  for (const int local : {2, 4}) {
    for (const int nodes : {2, 3, 4, 5, 7, 9, 12}) {
      const Topology topology{nodes, local};
      for (const int width : internal::AllowedWaveWidths(topology)) {
        for (const int passes : {1, 2, 3}) {
          const InboxSchedule planned = FromPrograms(topology, width, passes);
          const InboxSchedule simulated = PlannedInbox(
              topology, internal::CutIntoWaves(topology, width), passes, planned.generations);
          EXPECT_EQ(planned.writes, simulated.writes) << nodes << ' ' << width << ' ' << passes;
          EXPECT_EQ(planned.zeroes, simulated.zeroes) << nodes << ' ' << width << ' ' << passes;
        }
      }
    }
  }
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
