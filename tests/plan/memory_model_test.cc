#include "plan/memory_model.h"

#include <gtest/gtest.h>

#include "tide/error.h"

namespace tide::internal {
namespace {

constexpr int64_t kShard = 1 << 20;  // S; a multiple of everything that divides it below

MemoryShape Shape(int nodes, int local, Mode mode) {
  MemoryShape shape;
  shape.topology = {nodes, local};
  shape.mode = mode;
  shape.round_width = 4;
  shape.shard_bytes = kShard;
  shape.fp32_bytes = 2 * kShard;
  shape.grad_bytes = kShard;  // bf16
  return shape;
}

// (L * b_grad / 4 * n_stg + L * n_par + 2 * n_out + 2) * S_fp32.
int64_t Equation10(int local, int slots, int generations, int depth, int64_t fp32_bytes) {
  return (local * slots / 2 + local * generations + 2 * depth + 2) * fp32_bytes;
}

TEST(MemoryModel, FollowsEquation10) {
  for (const int nodes : {2, 3, 8, 9, 17, 64}) {
    for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
      const MemoryShape shape = Shape(nodes, 8, mode);
      const int generations = nodes <= 8 ? 1 : 2;
      const int remote = nodes - 1;
      // Two full rounds of four lie side by side from nine nodes on, and in one wave of eight.
      const int slot_depth = remote <= 4 ? remote : std::min(remote, 8);
      const int depth = mode == Mode::kInPlace ? remote : slot_depth;
      EXPECT_EQ(FormulaRegions(shape).reduce_scatter(),
                Equation10(8, 2, generations, depth, 2 * kShard))
          << nodes;
    }
  }
}

TEST(MemoryModel, InPlaceGrowsWithNodesAndSlotReuseDoesNot) {
  const int64_t slot64 = FormulaRegions(Shape(64, 8, Mode::kSlotReuse)).reduce_scatter();
  EXPECT_EQ(slot64, FormulaRegions(Shape(1024, 8, Mode::kSlotReuse)).reduce_scatter());
  EXPECT_EQ(slot64, (4 * 4 + 8 * 2 + 10) * 2 * kShard);  // equation 12
  EXPECT_EQ(FormulaRegions(Shape(64, 8, Mode::kInPlace)).reduce_scatter(),
            (2 * 64 + 8 * 2 + 8) * 2 * kShard);  // equation 11
}

TEST(MemoryModel, DirectKeepsOneBlockAContributor) {
  MemoryShape shape = Shape(64, 8, Mode::kSlotReuse);
  shape.placement = Placement::kDirect;
  EXPECT_EQ(FormulaRegions(shape).staging, 7 * 2 * kShard);
  EXPECT_EQ(FormulaRegions(shape).inbox, 8 * 2 * kShard);
  shape.wave_width = 4;
  EXPECT_EQ(FormulaRegions(shape).inbox, 4 * 2 * kShard);
  shape.topology.nodes = 3;
  shape.wave_width = 8;
  EXPECT_EQ(FormulaRegions(shape).inbox, 2 * 2 * kShard);
  EXPECT_EQ(FormulaRegions(shape).generations, 1);
}

TEST(MemoryModel, OneNodeStagesOnly) {
  const RegionBytes bytes = FormulaRegions(Shape(1, 8, Mode::kInPlace));
  EXPECT_EQ(bytes.staging, 7 * 2 * kShard);
  EXPECT_EQ(bytes.reduce_scatter(), bytes.staging);
  EXPECT_EQ(bytes.stage, 0);
}

TEST(MemoryModel, PassesShrinkAllButTheSpareAndTheFullOutbox) {
  MemoryShape shape = Shape(64, 8, Mode::kInPlace);
  const RegionBytes one = FormulaRegions(shape);
  shape.passes = 4;
  const RegionBytes four = FormulaRegions(shape);
  EXPECT_EQ(four.staging * 4, one.staging);
  EXPECT_EQ(four.inbox * 4, one.inbox);
  EXPECT_EQ(four.spare, one.spare);
  EXPECT_EQ(four.outbox, one.outbox);  // n_out = n_part * (M - 1) blocks of 1 / n_part
  shape.mode = Mode::kSlotReuse;
  EXPECT_EQ(FormulaRegions(shape).outbox * 4, 8 * 2 * kShard);
  // A single wave needs a second generation as soon as it comes twice.
  shape.topology.nodes = 8;
  EXPECT_EQ(FormulaRegions(shape).generations, 2);
}

TEST(MemoryModel, ExpertLanesKeepGradientsAsTheyAre) {
  MemoryShape shape = Shape(32, 1, Mode::kSlotReuse);
  const RegionBytes bytes = FormulaRegions(shape);
  EXPECT_EQ(bytes.staging, 0);
  EXPECT_EQ(bytes.stage, 0);
  EXPECT_EQ(bytes.spare, 0);
  EXPECT_EQ(bytes.inbox, 8 * kShard);
  EXPECT_EQ(bytes.generations, 2);
  EXPECT_EQ(bytes.outbox, 8 * kShard);
}

TEST(MemoryModel, StageHoldsTheOtherNodesAndTheCast) {
  MemoryShape shape = Shape(6, 4, Mode::kInPlace);
  EXPECT_EQ(FormulaRegions(shape).stage, 5 * kShard);
  shape.cast = true;
  EXPECT_EQ(FormulaRegions(shape).stage, 6 * kShard);
}

TEST(MemoryModel, AccumulatorOnlyForSeveralWavesOfANarrowOutput) {
  MemoryShape shape = Shape(16, 8, Mode::kInPlace);
  EXPECT_EQ(FormulaRegions(shape).accumulator, 0);
  shape.narrow_output = true;
  EXPECT_EQ(FormulaRegions(shape).accumulator, 2 * kShard);
  shape.topology.nodes = 8;
  EXPECT_EQ(FormulaRegions(shape).accumulator, 0);
}

}  // namespace
}  // namespace tide::internal
