// The planners' programs are safe and do what they promise; changed ones are not.
#include <gtest/gtest.h>

#include <functional>

#include "verify/mutants.h"
#include "verify/sequence.h"
#include "verify/setups.h"

namespace tide {
namespace {

using testing::MakeGroup;
using testing::MakeSetup;

void ExpectSafe(const VerifySetup& setup, const VerifyOptions& options = {}) {
  for (const auto& verify : {VerifyAllGather, VerifyReduceScatter, VerifyTraining}) {
    const VerifyResult result = verify(setup, options);
    EXPECT_TRUE(result.ok()) << setup.topology.nodes << " x " << setup.topology.local_ranks << "\n"
                             << ToText(result);
  }
}

TEST(Collectives, OneNode) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const DType shard : {DType::kBF16, DType::kF32}) {
      for (const auto& [slot_bytes, slots] : {std::pair{0, 1}, {1024, 1}, {1024, 3}}) {
        ExpectSafe(MakeSetup({1, ranks}, shard, DType::kBF16, slot_bytes, slots));
      }
    }
  }
}

TEST(Collectives, OneNodeShapes) {
  for (const auto& shape : testing::ShapeCases()) {
    for (const int ranks : {1, 3, 4}) {
      VerifySetup setup = MakeSetup({1, ranks}, DType::kBF16, DType::kF32, 4096, 2);
      setup.groups.push_back(MakeGroup(shape.name, shape, ranks, DType::kF32, DType::kF32));
      ExpectSafe(setup);
    }
  }
}

TEST(Collectives, Accumulating) {
  for (const DType output : {DType::kF32, DType::kBF16}) {
    for (const Topology& topology : {Topology{1, 2}, Topology{3, 2}, Topology{9, 1}}) {
      VerifySetup setup = MakeSetup(topology, DType::kBF16, DType::kBF16, 0, 1);
      for (VerifyGroup& group : setup.groups) {
        group.reduce.accumulate = true;
        group.reduce.output_dtype = output;
      }
      ExpectSafe(setup);
    }
  }
}

TEST(Collectives, OneLandingANode) {
  for (const Topology& topology : {Topology{1, 4}, Topology{3, 2}}) {
    for (const DType shard : {DType::kBF16, DType::kF32}) {
      VerifyOptions options;
      options.landing = LandingModel::kNode;
      ExpectSafe(MakeSetup(topology, shard, DType::kBF16, 0, 2), options);
    }
  }
}

TEST(Collectives, CastsInPartsAndTaperingChunks) {
  for (const Topology& topology : {Topology{1, 2}, Topology{1, 4}, Topology{2, 3}}) {
    VerifySetup setup = MakeSetup(topology, DType::kF32, DType::kBF16, 1024, 2);
    setup.all_gather.first_cast_bytes = 128;
    setup.reduce_scatter.staging.taper_bytes = 128;
    ExpectSafe(setup);
  }
}

TEST(Collectives, SeveralNodes) {
  for (const Topology& topology :
       {Topology{2, 1}, Topology{2, 4}, Topology{5, 3}, Topology{8, 1}, Topology{9, 2}}) {
    for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
      for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
        VerifySetup setup = MakeSetup(topology, DType::kF32, DType::kBF16, 0, 2);
        setup.all_gather.min_stripe_bytes = setup.reduce_scatter.min_stripe_bytes = 64;
        setup.all_gather.head_bytes = 256;
        setup.reduce_scatter.placement = placement;
        setup.reduce_scatter.mode = mode;
        ExpectSafe(setup);
      }
    }
  }
}

verify::Input OneSequence(const VerifySetup& setup,
                          const std::function<void(verify::Sequence*)>& calls) {
  verify::ProgramCache cache(setup);
  verify::Sequence sequence("calls", &cache, LandingModel::kRank);
  calls(&sequence);
  return sequence.Finish();
}

TEST(Refresh, NeedsWhatAnAllGatherHasBrought) {
  const VerifySetup setup = MakeSetup({1, 2}, DType::kF32, DType::kBF16, 0, 1);
  const auto nothing = OneSequence(setup, [](verify::Sequence* calls) { calls->Refresh(0, 0); });
  const VerifyResult result = verify::Verify(nothing, {});
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.findings[0].kind, FindingKind::kWrongValue) << ToText(result);
  EXPECT_NE(result.findings[0].detail.find("what the last all-gather has brought"),
            std::string::npos)
      << ToText(result);
  const auto gathered = OneSequence(setup, [](verify::Sequence* calls) {
    calls->AllGather(0, 0);
    calls->Refresh(0, 0);
  });
  EXPECT_TRUE(verify::Verify(gathered, {}).ok());
}

// One landing a node is written once, with what its ranks read behind an entry fence.
TEST(Refresh, OneLandingANode) {
  VerifyOptions options;
  options.landing = LandingModel::kNode;
  const VerifySetup setup = MakeSetup({1, 3}, DType::kF32, DType::kBF16, 0, 1);
  verify::ProgramCache cache(setup);
  for (verify::Input& input : verify::RefreshSequences(&cache, LandingModel::kNode)) {
    EXPECT_TRUE(verify::Verify(input, options).ok()) << input.name;
    auto& program = input.calls.back().programs[0];
    const auto mutants = verify::MakeMutants(verify::MutantKind::kDroppedWait,
                                             input.calls.back().programs, /*rank=*/0);
    ASSERT_EQ(mutants.size(), 4U);  // two fences between three ranks
    for (const verify::Mutant& mutant : mutants) {
      program = std::make_shared<const Program>(mutant.programs[0]);
      EXPECT_FALSE(verify::Verify(input, options).ok()) << mutant.description;
    }
  }
}

// Verifies reduce-scatters over four ranks after `change` has been made to every program.
VerifyResult VerifyChanged(const std::function<void(Program*)>& change) {
  const VerifySetup setup = MakeSetup({1, 4}, DType::kBF16, DType::kBF16, 0, 1);
  verify::ProgramCache cache(setup);
  verify::Input input = verify::ReduceScatterSequences(&cache, LandingModel::kRank)[0];
  for (verify::Call& call : input.calls) {
    for (auto& program : call.programs) {
      Program changed = *program;
      change(&changed);
      program = std::make_shared<const Program>(std::move(changed));
    }
  }
  return verify::Verify(input, {});
}

void ChangeSums(Program* program, const std::function<void(Operation*)>& change) {
  for (Operation& op : program->operations) {
    if (op.kind == OpKind::kSum) change(&op);
  }
}

void ExpectWrongValue(const VerifyResult& result, const std::string& words) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.findings[0].kind, FindingKind::kWrongValue) << ToText(result);
  EXPECT_NE(result.findings[0].detail.find(words), std::string::npos) << ToText(result);
}

TEST(Contract, UnchangedIsRight) {
  const VerifyResult result = VerifyChanged([](Program*) {});
  EXPECT_TRUE(result.ok()) << ToText(result);
}

TEST(Contract, OperandOrderMatters) {
  const VerifyResult result = VerifyChanged([](Program* program) {
    ChangeSums(program, [](Operation* op) {
      for (SumPiece& piece : op->sums) std::swap(piece.sources[0], piece.sources[1]);
    });
  });
  ExpectWrongValue(result, "in rank order");
}

TEST(Contract, EveryRankContributesOnce) {
  const VerifyResult twice = VerifyChanged([](Program* program) {
    ChangeSums(program, [](Operation* op) {
      for (SumPiece& piece : op->sums) piece.sources[1] = piece.sources[0];
    });
  });
  ExpectWrongValue(twice, "in rank order");
  const VerifyResult missing = VerifyChanged([](Program* program) {
    ChangeSums(program, [](Operation* op) {
      for (SumPiece& piece : op->sums) piece.sources.erase(piece.sources.begin());
    });
  });
  ExpectWrongValue(missing, "in rank order");
}

TEST(Contract, TheScaleBelongsToIt) {
  const VerifyResult result = VerifyChanged(
      [](Program* program) { ChangeSums(program, [](Operation* op) { op->scaled = false; }); });
  ExpectWrongValue(result, "scale");
}

TEST(Contract, ResultsAreNotRoundedOnTheWay) {
  const VerifyResult result = VerifyChanged([](Program* program) {
    ChangeSums(program, [](Operation* op) {
      for (SumPiece& piece : op->sums) {
        piece.elems /= 2;
        piece.dst_dtype = DType::kBF16;
      }
    });
  });
  EXPECT_FALSE(result.ok());
}

TEST(Contract, PaddingIsZero) {
  const VerifyResult result = VerifyChanged([](Program* program) {
    std::erase_if(program->operations,
                  [](const Operation& op) { return op.kind == OpKind::kZero; });
  });
  ExpectWrongValue(result, "expected zero, holds garbage");
}

}  // namespace
}  // namespace tide
