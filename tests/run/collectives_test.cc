// Results of both collectives on threads as ranks, against a scalar reference.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "testing/cases.h"
#include "testing/checks.h"
#include "testing/ranks.h"
#include "tide/communicator.h"
#include "tide/plan.h"

namespace tide {
namespace {

using testing::Alternate;
using testing::CheckAllGather;
using testing::CheckReduceScatter;
using testing::CheckRefresh;
using testing::Gradients;
using testing::Pointers;
using testing::RunCommunicators;
using testing::ShapeCase;
using testing::ValueAt;

constexpr int kMaxRanks = 9;
constexpr SegmentKind kKinds[] = {SegmentKind::kPerRank, SegmentKind::kNodeShared};

TEST(AllGather, ByteExactForAllTypesAndRankCounts) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    RunCommunicators(ranks, {}, [](Communicator& comm) {
      for (const ShapeCase& shape : testing::ShapeCases()) {
        for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF16, DType::kF32}) {
          for (const SegmentKind kind : kKinds) CheckAllGather(comm, shape, dtype, kind);
        }
      }
    });
  }
}

TEST(AllGather, CastsShardsOnTheWay) {
  RunCommunicators(3, {}, [](Communicator& comm) {
    const auto shapes = testing::MakeShapes({"cast", {7, 2, 100}, 13}, DType::kBF16);
    for (const SegmentKind kind : kKinds) {
      CheckAllGather(comm, "cast", shapes, DType::kF32, kind);
    }
  });
}

TEST(AllGather, ARefreshBringsWhatHasChanged) {
  const std::vector<ParamShape> mixed = {
      {"p", 70, 13, DType::kBF16}, {"bytes", 9, 5, DType::kU8}, {"q", 200, 301, DType::kBF16}};
  for (const int ranks : {1, 2, 3, 4}) {
    RunCommunicators(ranks, {}, [&](Communicator& comm) {
      for (const SegmentKind kind : kKinds) {
        for (const ShapeCase& shape : testing::ShapeCases()) {
          for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF32}) {
            CheckRefresh(comm, shape.name, testing::MakeShapes(shape, dtype), dtype, kind);
          }
        }
        for (const DType shard : {DType::kBF16, DType::kF32}) {
          CheckRefresh(comm, "mixed", mixed, shard, kind);
        }
      }
    });
  }
}

// Slots of a few lines cut every call into many chunks; the bits must not change.
void CheckAllShapes(int ranks) {
  for (const auto& [slot_bytes, slots] : {std::pair<int64_t, int>{0, 1}, {1024, 1}, {192, 2}}) {
    CommunicatorOptions options;
    options.reduce_scatter.staging = {slot_bytes, slots};
    RunCommunicators(ranks, options, [](Communicator& comm) {
      for (const ShapeCase& shape : testing::ShapeCases()) {
        const size_t count = shape.rows.size();
        CheckReduceScatter(comm, shape, {std::vector<DType>(count, DType::kBF16), 0.25F, false});
        CheckReduceScatter(comm, shape, {std::vector<DType>(count, DType::kF32), 1.0F / 3, true});
        CheckReduceScatter(comm, shape, {Alternate(count), 1.0F, false});
      }
    });
  }
}

TEST(ReduceScatter, BitwiseEqualToTheReference) { CheckAllShapes(3); }

TEST(ReduceScatter, BitwiseEqualForAllRankCountsSlow) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) CheckAllShapes(ranks);
}

// |error| <= W * 2^-24 * scale * sum of |x|: every addition and the scaling round once in fp32.
TEST(ReduceScatter, WithinFp32RoundingOfFp64) {
  RunCommunicators(7, {}, [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", {{"p", 70, 33, DType::kBF16}});
    const GroupLayout& layout = comm.layout(group);
    const auto gradient = Gradients(layout, {DType::kF32}, comm.rank());
    const auto elems = static_cast<size_t>(layout.params()[0].shard_elems);
    std::vector<float> output(elems);
    comm.ReduceScatter({group,
                        {0},
                        Pointers(gradient),
                        {DType::kF32},
                        output.data(),
                        DType::kF32,
                        1.0F / 7,
                        false});
    std::vector<std::vector<std::vector<char>>> all;
    for (int rank = 0; rank < 7; ++rank) {
      all.push_back(Gradients(layout, {DType::kF32}, rank));
    }
    for (size_t i = 0; i < elems; ++i) {
      double sum = 0;
      double magnitude = 0;
      for (const auto& theirs : all) {
        const auto at = static_cast<int64_t>(elems) * comm.rank() + static_cast<int64_t>(i);
        const double value = ValueAt(theirs[0], DType::kF32, at);
        sum += value;
        magnitude += std::abs(value);
      }
      ASSERT_NEAR(output[i], sum * (1.0F / 7), 7 * std::ldexp(magnitude / 7, -24)) << i;
    }
  });
}

TEST(ReduceScatter, RepeatsBitwise) {
  RunCommunicators(4, {}, [](Communicator& comm) {
    const ShapeCase shape{"repeat", {33, 7}, 129};
    for (int run = 0; run < 100; ++run) {
      CheckReduceScatter(comm, shape, {{DType::kBF16, DType::kBF16}, 0.25F, false});
    }
  });
}

TEST(ReduceScatter, PassesAreIgnoredOnOneNode) {
  CommunicatorOptions options;
  options.reduce_scatter.passes = 3;
  RunCommunicators(3, options, [](Communicator& comm) {
    const ShapeCase shape{"passes", {33, 7}, 129};
    CheckReduceScatter(comm, shape, {{DType::kBF16, DType::kBF16}, 0.25F, false});
  });
}

TEST(ReduceScatter, KeepsSmallContributions) {
  // bf16 running sums would stay at 256 (a known failure of bf16 reductions).
  RunCommunicators(9, {}, [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", {{"p", 9, 1, DType::kBF16}});
    const std::vector<uint16_t> gradient(9, testing::FloatToBF16(comm.rank() == 0 ? 256.0F : 1.0F));
    float output = 0;
    comm.ReduceScatter(
        {group, {0}, {gradient.data()}, {DType::kBF16}, &output, DType::kF32, 1.0F, false});
    EXPECT_EQ(output, 264.0F);
  });
}

TEST(Collectives, RandomSequenceOfGroups) {
  RunCommunicators(5, {}, [](Communicator& comm) {
    std::mt19937 random(11);  // equal on all ranks
    const auto shapes = testing::ShapeCases();
    for (int call = 0; call < 60; ++call) {
      const ShapeCase& shape = shapes[random() % shapes.size()];
      if (random() % 2 == 0) {
        CheckAllGather(comm, shape, random() % 2 == 0 ? DType::kBF16 : DType::kF32,
                       kKinds[random() % 2]);
      } else {
        CheckReduceScatter(comm, shape, {Alternate(shape.rows.size()), 0.5F, random() % 2 == 0});
      }
    }
  });
}

}  // namespace
}  // namespace tide
