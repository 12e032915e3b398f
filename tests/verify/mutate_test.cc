#include "verify/mutate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tide/error.h"
#include "verify/sequence.h"
#include "verify/setups.h"

namespace tide {
namespace {

using testing::MakeSetup;
using verify::MutantKind;
using verify::MutationTable;

VerifySetup SmallStripes(const Topology& topology) {
  VerifySetup setup = MakeSetup(topology, DType::kF32, DType::kBF16, 0, 1);
  setup.all_gather.min_stripe_bytes = setup.reduce_scatter.min_stripe_bytes = 64;
  setup.all_gather.head_bytes = 256;
  return setup;
}

MutationTable MutateAllGather(const VerifySetup& setup) {
  verify::ProgramCache cache(setup);
  return verify::RunMutation(verify::AllGatherSequences(&cache, LandingModel::kRank), {0}, {});
}

MutationTable MutateRefresh(const VerifySetup& setup) {
  verify::ProgramCache cache(setup);
  return verify::RunMutation(verify::RefreshSequences(&cache, LandingModel::kRank), {0}, {});
}

MutationTable MutateReduceScatter(const VerifySetup& setup) {
  verify::ProgramCache cache(setup);
  return verify::RunMutation(verify::ReduceScatterSequences(&cache, LandingModel::kRank), {0}, {});
}

int Injected(const MutationTable& table, MutantKind kind) {
  return table.rows[static_cast<size_t>(kind)].injected;
}

TEST(Mutate, OneNodeDetectsEverything) {
  for (const int ranks : {2, 4, 8}) {
    const VerifySetup setup = SmallStripes({1, ranks});
    MutationTable table = MutateAllGather(setup);
    EXPECT_EQ(Injected(table, MutantKind::kDroppedWait), 2 * (ranks - 1));
    EXPECT_EQ(Injected(table, MutantKind::kMissingCompletionFence), 1);
    table.Add(MutateReduceScatter(setup));
    EXPECT_TRUE(table.ok()) << ToText(table);
    for (size_t kind = 0; kind < table.rows.size(); ++kind) {
      EXPECT_EQ(table.rows[kind].injected, table.rows[kind].detected) << ToText(table);
    }
  }
}

// Among them entry fences, without which siblings still read what is written, and completion
// fences.
TEST(Mutate, RefreshesDetectEverything) {
  for (const int ranks : {2, 4, 8}) {
    const MutationTable table = MutateRefresh(SmallStripes({1, ranks}));
    EXPECT_EQ(Injected(table, MutantKind::kDroppedWait), 2 * (ranks - 1));
    EXPECT_EQ(Injected(table, MutantKind::kDroppedPair), 2 * (ranks - 1));
    EXPECT_EQ(Injected(table, MutantKind::kMissingCompletionFence), 1);
    EXPECT_EQ(Injected(table, MutantKind::kEarlySourceRelease), 1);
    EXPECT_GT(Injected(table, MutantKind::kWrongBlock), 0);
    for (const auto& row : table.rows) EXPECT_EQ(row.injected, row.detected) << ToText(table);
  }
}

TEST(Mutate, CastsInPartsDetectEverything) {
  VerifySetup setup = SmallStripes({1, 4});
  setup.all_gather.first_cast_bytes = 128;
  const MutationTable table = MutateAllGather(setup);
  EXPECT_EQ(Injected(table, MutantKind::kDroppedWait), 2 * 3);
  for (const auto& row : table.rows) EXPECT_EQ(row.injected, row.detected) << ToText(table);
}

TEST(Mutate, SeveralNodesDetectOrExplain) {
  for (const Topology& topology : {Topology{2, 2}, Topology{3, 1}, Topology{4, 2}}) {
    for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
      VerifySetup setup = SmallStripes(topology);
      setup.reduce_scatter.placement = placement;
      MutationTable table = MutateAllGather(setup);
      table.Add(MutateReduceScatter(setup));
      EXPECT_GT(Injected(table, MutantKind::kDuplicatedPut), 0);
      EXPECT_GT(Injected(table, MutantKind::kEarlyInboxReuse), 0);
      EXPECT_TRUE(table.ok()) << ToText(table);
    }
  }
}

// Where M = 2 + 1 the target of the last round has sent here before, so its credit says nothing
// new; the table says which wait does its work.
TEST(Mutate, RedundantWaitIsExplained) {
  const MutationTable table = MutateAllGather(SmallStripes({3, 2}));
  EXPECT_TRUE(table.ok()) << ToText(table);
  const auto& row = table.rows[static_cast<size_t>(MutantKind::kDroppedWait)];
  const auto names_credit = [](const std::string& text) {
    return text.find("credit of rank 2 >= +0; the same order comes with: rounds") !=
           std::string::npos;
  };
  EXPECT_EQ(std::count_if(row.explained.begin(), row.explained.end(), names_credit), 1)
      << ToText(table);
}

TEST(Mutate, UnsafeSequencesAreRefused) {
  const VerifySetup setup = SmallStripes({1, 2});
  verify::ProgramCache cache(setup);
  auto sequences = verify::AllGatherSequences(&cache, LandingModel::kRank);
  auto& program = sequences[0].calls[0].programs[0];
  program = std::make_shared<const Program>(
      verify::MakeMutants(MutantKind::kMissingCompletionFence, sequences[0].calls[0].programs, 0)[0]
          .programs[0]);
  EXPECT_THROW(verify::RunMutation(sequences, {0}, {}), Error);
}

}  // namespace
}  // namespace tide
