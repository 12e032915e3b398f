// Both collectives over several virtual nodes, ranks as threads, against a scalar reference.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "testing/cases.h"
#include "testing/checks.h"
#include "testing/random_case.h"
#include "testing/ranks.h"
#include "tide/communicator.h"

namespace tide {
namespace {

using testing::CheckAllGather;
using testing::CheckReduceScatter;
using testing::CoveringRow;
using testing::kCoveringRows;
using testing::kProductRows;
using testing::MakeOptions;
using testing::MakeRandomCase;
using testing::PlanChoice;
using testing::ProductRow;
using testing::RandomCase;
using testing::ReductionReference;
using testing::RunCommunicators;

constexpr int kLayouts = 20;
constexpr int kMaxParams = 300;

// One random group: gathered in bf16 from bf16 or fp32 shards, or as plain bytes; reduced into fp32
// and into bf16.
void CheckOneLayout(const Topology& topology, const PlanChoice& choice, unsigned seed,
                    int max_params = kMaxParams) {
  SCOPED_TRACE(::testing::Message()
               << topology.nodes << " x " << topology.local_ranks << ", seed " << seed
               << ", n_part " << choice.passes << ", k " << choice.round_width << ", "
               << Name(choice.mode) << ", " << Name(choice.placement));
  const RandomCase made = MakeRandomCase(seed, max_params);
  const CommunicatorOptions options = MakeOptions(topology, choice, seed);
  const GroupLayout layout("g", made.shapes, topology.Ranks());
  const ReductionReference reference(layout, topology, options.reduce_scatter, made.grad_dtypes);
  auto bytes = made.shapes;
  for (ParamShape& shape : bytes) shape.dtype = DType::kU8;
  RunCommunicators(topology.Ranks(), options, [&](Communicator& comm) {
    CheckAllGather(comm, "bf16", made.shapes, seed % 2 == 0 ? DType::kBF16 : DType::kF32,
                   seed % 4 < 2 ? SegmentKind::kNodeShared : SegmentKind::kPerRank);
    CheckReduceScatter(comm, "g", made.shapes,
                       {made.grad_dtypes, made.scale, made.accumulate, DType::kF32}, reference);
    CheckAllGather(comm, "u8", bytes, DType::kU8);
    CheckReduceScatter(comm, "g", made.shapes,
                       {made.grad_dtypes, made.scale, !made.accumulate, DType::kBF16}, reference);
  });
}

void CheckLayouts(const Topology& topology, int count, int max_params = kMaxParams) {
  for (int i = 0; i < count; ++i) {
    const auto seed = static_cast<unsigned>(1000 * topology.nodes + 100 * topology.local_ranks + i);
    CheckOneLayout(topology, CoveringRow(i % kCoveringRows), seed, max_params);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(CoveringArray, HasEveryPair) {
  std::set<std::string> pairs;
  for (int row = 0; row < kCoveringRows; ++row) {
    const PlanChoice c = CoveringRow(row);
    const std::vector<int> values = {c.passes, c.round_width, static_cast<int>(c.mode),
                                     static_cast<int>(c.placement)};
    for (size_t a = 0; a < values.size(); ++a) {
      for (size_t b = a + 1; b < values.size(); ++b) {
        pairs.insert(std::to_string(a) + std::to_string(b) + std::to_string(values[a]) +
                     std::to_string(values[b]));
      }
    }
  }
  EXPECT_EQ(pairs.size(), 16U + 8U + 8U + 8U + 8U + 4U);
}

TEST(Nodes, FewTopologies) {
  for (const Topology& topology :
       {Topology{2, 1}, Topology{5, 1}, Topology{2, 2}, Topology{3, 2}, Topology{2, 3}}) {
    CheckLayouts(topology, 4, 20);
  }
}

// k beyond the other nodes asks for no more memory than k = M - 1.
TEST(Nodes, WideRoundsTakeNoMoreMemory) {
  CommunicatorOptions options;
  options.nodes = 2;
  options.reduce_scatter.round_width = 1 << 30;
  options.memory_limit_bytes = 16 << 20;
  RunCommunicators(4, options, [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", {{"p", 100, 5, DType::kBF16}});
    comm.Reserve({{group, {0}, {DType::kBF16}, DType::kF32}});
    comm.Barrier();
  });
}

// What is reserved is what the planner says that the largest group needs (equations 10 to 12),
// rounded to cache lines.
TEST(Nodes, ReservedRegionsAreThePlans) {
  constexpr int64_t kLine = 64;
  CommunicatorOptions options;
  options.nodes = 2;
  options.reduce_scatter.staging = {.slot_bytes = 4096, .slots = 2};
  RunCommunicators(4, options, [&](Communicator& comm) {
    const ReduceScatterSpec spec{{0}, {DType::kBF16}, DType::kF32};
    const int small = comm.RegisterGroup("small", {{"p", 40, 9, DType::kBF16}});
    const int large = comm.RegisterGroup("large", {{"p", 900, 31, DType::kBF16}});
    comm.Reserve(
        {{small, {0}, {DType::kBF16}, DType::kF32}, {large, {0}, {DType::kBF16}, DType::kF32}});
    const RegionBytes plan =
        ReduceScatterRegions(comm.layout(large), spec, comm.topology(), options.reduce_scatter);
    const RegionBytes& reserved = comm.regions();
    EXPECT_EQ(reserved.staging, plan.staging);
    EXPECT_EQ(reserved.generations, plan.generations);
    for (const auto& [have, need] :
         {std::pair(reserved.outbox, plan.outbox), std::pair(reserved.spare, plan.spare),
          std::pair(reserved.inbox, plan.inbox)}) {
      EXPECT_GE(have, need);
      EXPECT_LT(have, need + kLine);
    }
    EXPECT_EQ(reserved.stage, AllGatherRegions(comm.layout(large), comm.topology(), {}).stage);
    comm.Barrier();
  });
}

class Topologies : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  Topology topology() const { return {GetParam().first, GetParam().second}; }
};

std::vector<std::pair<int, int>> UpToSixteenRanks() {
  std::vector<std::pair<int, int>> all;
  for (int nodes = 1; nodes <= 16; ++nodes) {
    for (int locals = 1; nodes * locals <= 16; ++locals) all.emplace_back(nodes, locals);
  }
  return all;
}

std::string TopologyName(const ::testing::TestParamInfo<std::pair<int, int>>& info) {
  return std::to_string(info.param.first) + "x" + std::to_string(info.param.second);
}

TEST_P(Topologies, RandomLayoutsSlow) { CheckLayouts(topology(), kLayouts); }

TEST_P(Topologies, FullProduct) {
  for (int row = 0; row < kProductRows && !HasFailure(); ++row) {
    CheckOneLayout(topology(), ProductRow(row), static_cast<unsigned>(row));
  }
}

INSTANTIATE_TEST_SUITE_P(Small, Topologies, ::testing::ValuesIn(UpToSixteenRanks()), TopologyName);
INSTANTIATE_TEST_SUITE_P(Large, Topologies,
                         ::testing::Values(std::pair(9, 4), std::pair(9, 8), std::pair(12, 8),
                                           std::pair(17, 8)),
                         TopologyName);

}  // namespace
}  // namespace tide
