// What programs become: merged commands, limits of the APIs, names of signals.
#include "fabric/nccl/lowering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fabric/nccl/device.h"
#include "tide/plan.h"

namespace tide {
namespace {

using nccl::Command;
using nccl::CommandKind;
using nccl::Lower;
using nccl::Lowered;
using nccl::Reach;

GroupLayout Layout(int ranks, int params, int64_t rows, int64_t row_elems = 1) {
  std::vector<ParamShape> shapes;
  for (int p = 0; p < params; ++p) {
    shapes.push_back({"p" + std::to_string(p), rows, row_elems, DType::kBF16});
  }
  return GroupLayout("g", shapes, ranks);
}

Program AllGather(const Topology& topology, const GroupLayout& layout, int rank = 0) {
  return PlanAllGather(layout, std::vector<DType>(layout.params().size(), DType::kBF16), topology,
                       rank);
}

Program ReduceScatter(const Topology& topology, const GroupLayout& layout, int64_t slot_bytes) {
  ReduceScatterSpec spec;
  for (size_t p = 0; p < layout.params().size(); ++p) {
    spec.params.push_back(static_cast<int>(p));
    spec.grad_dtypes.push_back(DType::kBF16);
  }
  ReduceScatterOptions options;
  options.staging = {slot_bytes, 2};
  return PlanReduceScatter(layout, spec, topology, 0, options);
}

std::vector<CommandKind> Kinds(const Lowered& lowered) {
  std::vector<CommandKind> kinds;
  for (const Command& command : lowered.commands) kinds.push_back(command.kind);
  return kinds;
}

int Most(const Lowered& lowered, CommandKind kind) {
  int most = 0;
  for (const Command& command : lowered.commands) {
    if (command.kind == kind) most = std::max(most, command.count);
  }
  return most;
}

TEST(Lowering, AllGatherOfANode) {
  const Lowered lowered = Lower(AllGather({1, 4}, Layout(4, 3, 8)));
  using Kind = CommandKind;
  // ready; entry fence; one batch; read_done; completion fence; done.
  EXPECT_EQ(Kinds(lowered), (std::vector<Kind>{Kind::kAwait, Kind::kMemoryOps, Kind::kCopies,
                                               Kind::kRecord, Kind::kMemoryOps, Kind::kRecord}));
  EXPECT_EQ(lowered.commands[1].count, 6);   // 3 signals, then 3 waits
  EXPECT_EQ(lowered.commands[2].count, 12);  // 3 parameters to 4 ranks
  EXPECT_EQ(lowered.streams, std::vector<std::string>{"main"});
}

std::set<int> Destinations(const Lowered& lowered) {
  std::set<int> ranks;
  for (const nccl::LoweredCopy& copy : lowered.copies) {
    ranks.insert(lowered.bases[static_cast<size_t>(copy.dst.base)].rank);
  }
  return ranks;
}

TEST(Lowering, MulticastIsOneCopyAPiece) {
  const Lowered lowered = Lower(AllGather({1, 4}, Layout(4, 3, 8)), Reach::kMulticast);
  ASSERT_EQ(lowered.commands[2].kind, CommandKind::kCopies);
  EXPECT_EQ(lowered.commands[2].count, 3);  // 3 parameters to the node
  EXPECT_EQ(Destinations(lowered), std::set<int>{nccl::kWholeNode});
}

// However large: nothing is copied beside it.
TEST(Lowering, MulticastWritesTheOwnLandingToo) {
  const Lowered lowered =
      Lower(AllGather({1, 2}, Layout(2, 1, 2 << 12, 1 << 10)), Reach::kMulticast);
  EXPECT_EQ(lowered.streams.size(), 1U);
  EXPECT_EQ(lowered.copies.size(), 1U);
}

TEST(Lowering, SlotsAreMulticastAsTheyArrive) {
  const GroupLayout layout = Layout(12, 3, 24);
  const auto pieces = [&](Reach reach) {
    const Lowered lowered = Lower(AllGather({6, 2}, layout), reach);
    return lowered.copies.size() + lowered.pitched.size();
  };
  constexpr size_t kOwn = 3;  // shards that are copied into the stage
  EXPECT_EQ(pieces(Reach::kUnicast) - kOwn, 2 * (pieces(Reach::kMulticast) - kOwn));
}

// From the own landing: the multicast would write to its source.
TEST(Lowering, CastShardsGoToThePeersOneByOne) {
  const GroupLayout layout = Layout(4, 3, 8);
  const Program program = PlanAllGather(layout, std::vector<DType>(3, DType::kF32), {1, 4}, 0);
  EXPECT_EQ(Destinations(Lower(program, Reach::kMulticast)), (std::set<int>{1, 2, 3}));
}

// Multicast or not: what is written is little, and to be written where the own landing differs.
TEST(Lowering, ARefreshIsOneKernel) {
  const GroupLayout layout = Layout(4, 3, 8);
  AllGatherOptions options;
  options.refresh = true;
  const std::vector<DType> dtypes = {DType::kF32, DType::kBF16, DType::kF32};
  const Program program = PlanAllGather(layout, dtypes, {1, 4}, /*rank=*/1, options);
  for (const Reach reach : {Reach::kUnicast, Reach::kMulticast}) {
    const Lowered lowered = Lower(program, reach);
    using Kind = CommandKind;
    EXPECT_EQ(Kinds(lowered), (std::vector<Kind>{Kind::kAwait, Kind::kMemoryOps, Kind::kSum,
                                                 Kind::kRecord, Kind::kMemoryOps, Kind::kRecord}));
    EXPECT_EQ(lowered.streams.size(), 1U);
    ASSERT_EQ(lowered.sums.size(), 1U);
    EXPECT_EQ(lowered.sums[0].kind, nccl::SumKind::kRefresh);
    ASSERT_EQ(lowered.sums[0].items.size(), 3U);
    for (size_t p = 0; p < 3; ++p) {
      const auto& item = lowered.sums[0].items[p];
      EXPECT_EQ(item.src_dtype, dtypes[p]);
      EXPECT_EQ(item.sources.size(), 1U);
      std::vector<int> ranks = {lowered.bases[static_cast<size_t>(item.dst.base)].rank};
      for (const auto& copy : item.copies) {
        ranks.push_back(lowered.bases[static_cast<size_t>(copy.base)].rank);
        EXPECT_EQ(copy.offset, item.dst.offset);
      }
      EXPECT_EQ(ranks, (std::vector<int>{1, 2, 3, 0}));
    }
  }
}

TEST(Lowering, SwitchIsTheOneSourceOfALanding) {
  ReduceScatterOptions options;
  options.staging = {1 << 16, 2};
  options.placement = Placement::kLatinSquare;
  const GroupLayout layout = Layout(8, 1, 800);
  const ReduceScatterSpec spec{.params = {0}, .grad_dtypes = {DType::kBF16}};
  const Program program = PlanReduceScatter(layout, spec, {2, 4}, 0, options);
  const auto sums = [&](Reach reach, nccl::SumKind kind) {
    std::set<size_t> sources;
    for (const nccl::LoweredSum& sum : Lower(program, reach).sums) {
      if (sum.kind != kind || !sum.scaled) continue;
      for (const auto& item : sum.items) sources.insert(item.sources.size());
    }
    return sources;
  };
  EXPECT_EQ(sums(Reach::kUnicast, nccl::SumKind::kSum), std::set<size_t>{4});
  EXPECT_EQ(sums(Reach::kUnicast, nccl::SumKind::kMulticast), std::set<size_t>{});
  EXPECT_EQ(sums(Reach::kMulticast, nccl::SumKind::kSum), std::set<size_t>{});
  EXPECT_EQ(sums(Reach::kMulticast, nccl::SumKind::kMulticast), std::set<size_t>{1});
}

TEST(Lowering, LargeOwnCopyRunsBesideThePush) {
  const Lowered lowered = Lower(AllGather({1, 2}, Layout(2, 1, 2 << 12, 1 << 10)));
  ASSERT_EQ(lowered.streams.size(), 2U);
  std::vector<std::pair<int, int>> copies;  // stream, base of the destination
  for (const Command& command : lowered.commands) {
    if (command.kind != CommandKind::kCopies) continue;
    copies.emplace_back(command.stream,
                        lowered.copies[static_cast<size_t>(command.first)].dst.base);
  }
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_EQ(copies[0].first, 1);
  EXPECT_EQ(lowered.bases[static_cast<size_t>(copies[0].second)].rank, 0);
  EXPECT_EQ(copies[1].first, 0);
  EXPECT_EQ(lowered.bases[static_cast<size_t>(copies[1].second)].rank, 1);
}

TEST(Lowering, CommandsDoNotDependOnTheNumberOfTensors) {
  for (const Topology& topology : {Topology{1, 4}, Topology{2, 2}, Topology{3, 2}}) {
    const int ranks = topology.Ranks();
    EXPECT_EQ(Kinds(Lower(AllGather(topology, Layout(ranks, 2, ranks)))),
              Kinds(Lower(AllGather(topology, Layout(ranks, 500, ranks)))));
    EXPECT_EQ(Kinds(Lower(ReduceScatter(topology, Layout(ranks, 2, ranks), 1 << 20))),
              Kinds(Lower(ReduceScatter(topology, Layout(ranks, 500, ranks), 1 << 20))));
  }
}

TEST(Lowering, KeepsTheLimitsOfTheApis) {
  const Lowered many_ranks = Lower(AllGather({1, 200}, Layout(200, 1, 200)));
  EXPECT_EQ(Most(many_ranks, CommandKind::kMemoryOps), static_cast<int>(nccl::kMaxMemoryOps));
  EXPECT_EQ(many_ranks.memory_ops.size(), 4U * 199U);
  // One put a parameter, from landing to landing.
  const Lowered many_puts = Lower(AllGather({2, 1}, Layout(2, 300, 2)));
  EXPECT_EQ(Most(many_puts, CommandKind::kSends), 128);
  EXPECT_GE(many_puts.sends.size(), 300U);
}

TEST(Lowering, TransfersOfARoundAreOneGroup) {
  ReduceScatterOptions options;
  options.staging = {1 << 16, 2};
  options.round_width = 3;
  const GroupLayout layout = Layout(16, 1, 64);
  const ReduceScatterSpec spec{.params = {0}, .grad_dtypes = {DType::kBF16}};
  const Lowered lowered = Lower(PlanReduceScatter(layout, spec, {4, 4}, 0, options));
  std::set<int> peers;
  for (const Command& command : lowered.commands) {
    if (command.kind != CommandKind::kSends || command.count < 3) continue;
    for (int i = command.first; i < command.first + command.count; ++i) {
      peers.insert(lowered.sends[static_cast<size_t>(i)].peer);
    }
  }
  EXPECT_EQ(peers, (std::set<int>{4, 8, 12}));
}

TEST(Lowering, EveryQueueOfAFloorAwaitsTheCallerAndIsAwaited) {
  const Lowered lowered =
      Lower(WithoutSynchronisation(ReduceScatter({1, 2}, Layout(2, 1, 2), 1 << 16)));
  const auto kinds = Kinds(lowered);
  EXPECT_EQ(kinds[0], CommandKind::kAwait);
  EXPECT_EQ(kinds[1], CommandKind::kAwait);
  EXPECT_EQ(lowered.commands.back().kind, CommandKind::kRecord);
  EXPECT_EQ(lowered.commands.back().first, nccl::kDoneEvent);
  EXPECT_EQ(kinds[kinds.size() - 2], CommandKind::kAwait);
}

TEST(Lowering, CountersBetweenNodesHaveSignalsOfTheirOwn) {
  std::set<std::pair<int, int>> signals;
  size_t counters = 0;
  for (const CounterKind kind : {CounterKind::kEntry, CounterKind::kHead, CounterKind::kArrived,
                                 CounterKind::kConfirmed, CounterKind::kCredit}) {
    for (int index = 0; index < CounterIndices(kind); ++index, ++counters) {
      const nccl::RailSignal signal = nccl::RailSignalOf({kind, 0, index});
      EXPECT_LT(signal.signal, nccl::kRailSignals);
      EXPECT_LT(signal.context, kMaxContexts);
      signals.emplace(signal.signal, signal.context);
    }
  }
  EXPECT_EQ(signals.size(), counters);
}

// A piece arrives in the order of its context, so the context of a put must be its signal's.
TEST(Lowering, PutsAreSignalledInTheirContext) {
  AllGatherOptions options;
  options.min_stripe_bytes = 64;
  const GroupLayout layout = Layout(6, 3, 600);
  const Program program =
      PlanAllGather(layout, std::vector<DType>(3, DType::kBF16), {3, 2}, 0, options);
  std::set<int> contexts;
  for (const Operation& op : program.operations) {
    for (const PutPiece& put : op.puts) {
      EXPECT_EQ(nccl::RailSignalOf({put.signal, 0, put.signal_index}).context, put.context);
      contexts.insert(put.context);
    }
  }
  EXPECT_EQ(contexts.size(), 4U);
}

}  // namespace
}  // namespace tide
