#include "tide/plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "testing/cases.h"
#include "tide/error.h"

namespace tide {
namespace {

constexpr int kMaxRanks = 9;

ReduceScatterSpec SpecOf(const GroupLayout& layout, DType dtype) {
  ReduceScatterSpec spec;
  for (size_t p = 0; p < layout.params().size(); ++p) spec.params.push_back(static_cast<int>(p));
  spec.grad_dtypes.assign(layout.params().size(), dtype);
  return spec;
}

std::vector<Program> AllRanks(int ranks, const std::function<Program(int)>& plan) {
  std::vector<Program> programs;
  for (int rank = 0; rank < ranks; ++rank) programs.push_back(plan(rank));
  return programs;
}

// What every rank's signals add to (rank, counter kind, producer).
std::map<std::tuple<int, int, int>, int64_t> Produced(const std::vector<Program>& programs) {
  std::map<std::tuple<int, int, int>, int64_t> produced;
  for (const Program& program : programs) {
    for (const Operation& op : program.operations) {
      if (op.kind != OpKind::kSignal) continue;
      EXPECT_EQ(op.counter.producer, program.rank);
      ++produced[{op.peer, static_cast<int>(op.counter.kind), op.counter.producer}];
    }
  }
  return produced;
}

void ExpectCountersBalance(const std::vector<Program>& programs) {
  auto produced = Produced(programs);
  for (const Program& program : programs) {
    for (const Increment& inc : program.increments) {
      const auto key =
          std::tuple(program.rank, static_cast<int>(inc.counter.kind), inc.counter.producer);
      EXPECT_EQ(produced[key], inc.value);
      produced.erase(key);
    }
  }
  EXPECT_TRUE(produced.empty());
}

// Every rank's operations in one FIFO, executed round robin: it must come to its end.
void ExpectNoDeadlockAsFifo(const std::vector<Program>& programs) {
  std::map<std::tuple<int, int, int>, int64_t> counters;
  std::vector<size_t> next(programs.size(), 0);
  bool progress = true;
  while (progress) {
    progress = false;
    for (size_t r = 0; r < programs.size(); ++r) {
      while (next[r] < programs[r].operations.size()) {
        const Operation& op = programs[r].operations[next[r]];
        const int kind = static_cast<int>(op.counter.kind);
        // From an idle start: a wait for +0 is satisfied.
        if (op.kind == OpKind::kWait &&
            counters[{static_cast<int>(r), kind, op.counter.producer}] < op.value)
          break;
        if (op.kind == OpKind::kSignal) ++counters[{op.peer, kind, op.counter.producer}];
        ++next[r];
        progress = true;
      }
    }
  }
  for (size_t r = 0; r < programs.size(); ++r) {
    EXPECT_EQ(next[r], programs[r].operations.size())
        << "rank " << r << " is stuck at "
        << ToString(programs[r], programs[r].operations[next[r]]);
  }
}

void ExpectRefsInBounds(const Program& program) {
  const auto inside = [&](Ref ref, int64_t bytes) {
    ASSERT_GE(ref.offset, 0);
    ASSERT_LE(ref.offset + bytes, program.buffers[static_cast<size_t>(ref.buffer)].bytes)
        << ToString(program.buffers[static_cast<size_t>(ref.buffer)]);
  };
  for (const Operation& op : program.operations) {
    for (const Piece& p : op.pieces) {
      inside(p.dst, p.row_bytes);
      inside(p.src, p.row_bytes);
    }
    for (const CastPiece& p : op.casts) {
      inside(p.dst, p.elems * static_cast<int64_t>(ItemSize(p.dst_dtype)));
      inside(p.src, p.elems * static_cast<int64_t>(ItemSize(p.src_dtype)));
    }
    for (const SumPiece& p : op.sums) {
      inside(p.dst, p.elems * static_cast<int64_t>(ItemSize(p.dst_dtype)));
      for (const Ref& source : p.sources)
        inside(source, p.elems * static_cast<int64_t>(ItemSize(p.src_dtype)));
    }
  }
}

TEST(PlanAllGather, CountersBalanceAndFifoEnds) {
  for (const auto& shape : testing::ShapeCases()) {
    for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
      const Topology topology{1, ranks};
      const GroupLayout layout("g", testing::MakeShapes(shape, DType::kBF16), ranks);
      for (const DType shard : {DType::kBF16, DType::kF32}) {
        const std::vector<DType> dtypes(layout.params().size(), shard);
        for (const bool refresh : {false, true}) {
          const auto programs = AllRanks(ranks, [&](int rank) {
            return PlanAllGather(layout, dtypes, topology, rank, {.refresh = refresh});
          });
          ExpectCountersBalance(programs);
          ExpectNoDeadlockAsFifo(programs);
          for (const Program& program : programs) ExpectRefsInBounds(program);
        }
      }
    }
  }
}

TEST(PlanReduceScatter, CountersBalanceAndFifoEnds) {
  for (const auto& shape : testing::ShapeCases()) {
    for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
      const Topology topology{1, ranks};
      const GroupLayout layout("g", testing::MakeShapes(shape, DType::kBF16), ranks);
      const ReduceScatterSpec spec = SpecOf(layout, DType::kBF16);
      const int64_t whole = std::max(StagedBytes(layout, spec), kStagingAlignment);
      for (const StagingOptions& staging :
           {StagingOptions{whole, 1}, StagingOptions{64, 1}, StagingOptions{64, 2},
            StagingOptions{192, 3}, StagingOptions{1024, 2, 64}}) {
        const auto programs = AllRanks(ranks, [&](int rank) {
          return PlanReduceScatter(layout, spec, topology, rank, {.staging = staging});
        });
        ExpectCountersBalance(programs);
        ExpectNoDeadlockAsFifo(programs);
        for (const Program& program : programs) ExpectRefsInBounds(program);
      }
    }
  }
}

TEST(PlanReduceScatter, LastChunksTaper) {
  const GroupLayout layout("g", {{"p", 2048, 1, DType::kBF16}, {"q", 2048, 1, DType::kBF16}}, 2);
  const auto pushed = [&](int64_t taper_bytes) {
    std::vector<int64_t> bytes;
    const Program program = PlanReduceScatter(
        layout, SpecOf(layout, DType::kBF16), {1, 2}, 0,
        {.staging = {.slot_bytes = 1024, .slots = 2, .taper_bytes = taper_bytes}});
    for (const Operation& op : program.operations) {
      if (op.kind != OpKind::kCopy) continue;
      bytes.push_back(0);
      for (const Piece& piece : op.pieces) bytes.back() += piece.rows * piece.row_bytes;
    }
    return bytes;
  };
  EXPECT_EQ(pushed(0), (std::vector<int64_t>{1024, 1024, 1024, 1024}));
  EXPECT_EQ(pushed(256), (std::vector<int64_t>{1024, 1024, 1024, 512, 256, 256}));
}

// Rails run puts and waits in the order of issue: the wait for a group must not stand behind puts
// that no earlier wait lets go.
TEST(PlanAllGather, GroupsOfTheLastRoundGoOneByOne) {
  const Topology topology{8, 2};
  const GroupLayout layout("g", {{"p", 16 * 64, 64, DType::kBF16}}, topology.Ranks());  // 8 KiB
  const auto last_round = [&](int64_t min_stripe_bytes) {
    const Program program = PlanAllGather(layout, {DType::kBF16}, topology, 0,
                                          {.head_bytes = 0, .min_stripe_bytes = min_stripe_bytes});
    const int target = topology.Rank(4, 0);  // 2^2 nodes away, as the sender is
    std::string order;
    for (const Operation& op : program.operations) {
      if (op.kind == OpKind::kPut && op.peer == target) order += 'p';
      const bool wait = op.kind == OpKind::kWait && op.counter.kind == CounterKind::kArrived;
      const bool first_stripe = op.counter.index % kMaxContexts == 0;
      if (wait && op.counter.producer == target && first_stripe) order += 'w';
    }
    return order;
  };
  EXPECT_EQ(last_round(8 << 10), "pwpwpwpw");
  EXPECT_EQ(last_round(16 << 10), "pwpw");
  EXPECT_EQ(last_round(1 << 20), "pw") << "groups that are not worth a put and a wait";
}

TEST(PlanAllGather, CastsInParts) {
  const GroupLayout layout("g", {{"p", 2048, 1, DType::kBF16}, {"q", 100, 1, DType::kBF16}}, 2);
  const Program program =
      PlanAllGather(layout, {DType::kF32, DType::kBF16}, {1, 2}, 1, {.first_cast_bytes = 256});
  std::vector<int64_t> cast;
  std::vector<int64_t> sent;
  for (const Operation& op : program.operations) {
    if (op.kind == OpKind::kCast) cast.push_back(2 * op.casts.at(0).elems);
    if (op.kind == OpKind::kMulticast) sent.push_back(op.pieces.at(0).row_bytes);
  }
  EXPECT_EQ(cast, (std::vector<int64_t>{256, 512, 1024, 256}));
  EXPECT_EQ(sent, (std::vector<int64_t>{100, 256, 512, 1024, 256}));  // q needs no cast
}

TEST(PlanReduceScatter, SumsInLocalRankOrderOwnLast) {
  const Topology topology{1, 4};
  const GroupLayout layout("g", {{"p", 8, 2, DType::kBF16}}, 4);
  const Program program =
      PlanReduceScatter(layout, SpecOf(layout, DType::kBF16), topology, 1, {.staging = {1024, 1}});
  for (const Operation& op : program.operations) {
    if (op.kind != OpKind::kSum) continue;
    ASSERT_EQ(op.sums.size(), 1U);
    std::vector<std::string> order;
    for (const Ref& source : op.sums[0].sources) {
      order.push_back(ToString(program.buffers[static_cast<size_t>(source.buffer)]));
    }
    // Ranks 0, 2, 3 seen from owner 1 are at distances 3, 1, 2.
    EXPECT_EQ(order,
              (std::vector<std::string>{"staging[3]", "staging[1]", "staging[2]", "gradient[0]"}));
  }
}

TEST(Plan, BadInputIsRefused) {
  const Topology topology{1, 2};
  const GroupLayout layout("g", {{"p", 8, 2, DType::kU8}}, 2);
  EXPECT_THROW(PlanAllGather(layout, {}, topology, 0), Error);
  EXPECT_THROW(PlanAllGather(layout, {DType::kF32}, topology, 0), Error);
  EXPECT_THROW(PlanAllGather(layout, {DType::kU8}, topology, 2), Error);
  EXPECT_THROW(PlanReduceScatter(layout, {{0}, {DType::kU8}}, topology, 0, {.staging = {64, 1}}),
               Error);
  EXPECT_THROW(PlanReduceScatter(layout, {{1}, {DType::kF32}}, topology, 0, {.staging = {64, 1}}),
               Error);
  EXPECT_THROW(PlanReduceScatter(layout, {{0}, {}}, topology, 0, {.staging = {64, 1}}), Error);
  EXPECT_THROW(PlanReduceScatter(layout, {{0}, {DType::kF32}}, topology, 0, {.staging = {8, 1}}),
               Error);
}

// The text of the Error(kInvalidArgument) that planning ends with.
std::string Refusal(const std::function<void()>& plan) {
  try {
    plan();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "planned";
}

TEST(Plan, ImpossibleAllGathersNameTheRule) {
  const GroupLayout layout("g", {{"p", 8, 2, DType::kBF16}}, 4);
  const std::vector<DType> dtypes = {DType::kBF16};
  EXPECT_EQ(Refusal([&] {
              PlanAllGather(layout, dtypes, {2, 2}, 0, {.contexts = 0});
            }),
            "all_gather: contexts: expected 1 to 4, got 0");
  EXPECT_EQ(Refusal([&] {
              PlanAllGather(layout, {DType::kF32}, {2, 2}, 0, {.resident = true});
            }),
            "all_gather of group 'g': shards are resident, but parameter 'p' needs a cast from "
            "fp32 to bf16; expected equal dtypes");
  EXPECT_EQ(Refusal([&] {
              PlanAllGather(layout, dtypes, {2, 2}, 0, {.refresh = true});
            }),
            "all_gather of group 'g': a landing is refreshed on one node only, got 2 nodes; "
            "expected refresh = false");
  EXPECT_EQ(Refusal([&] {
              PlanAllGather(layout, dtypes, {3, 2}, 0);
            }),
            "group 'g' is laid out for 4 ranks, but 3 nodes of 2 local ranks are 6 ranks; expected "
            "as many");
}

TEST(Plan, ImpossibleReduceScattersNameTheRule) {
  constexpr StagingOptions kStaging{1024, 1};
  const auto refusal = [](const Topology& topology, const ReduceScatterOptions& options,
                          int ranks = 0) {
    const GroupLayout layout("g", {{"p", 8, 2, DType::kBF16}},
                             ranks > 0 ? ranks : topology.Ranks());
    return Refusal(
        [&] { PlanReduceScatter(layout, SpecOf(layout, DType::kBF16), topology, 0, options); });
  };
  EXPECT_EQ(refusal({2, 2}, {.staging = kStaging}, 6),
            "group 'g' is laid out for 6 ranks, but 2 nodes of 2 local ranks are 4 ranks; expected "
            "as many");
  EXPECT_EQ(refusal({2, 2}, {.round_width = 0, .staging = kStaging}),
            "reduce_scatter: round width k: expected at least 1, got 0");
  EXPECT_EQ(refusal({2, 2}, {.passes = 0, .staging = kStaging}),
            "reduce_scatter: passes n_part: expected at least 1, got 0");
  EXPECT_EQ(refusal({2, 2}, {.passes = 65, .staging = kStaging}),
            "reduce_scatter: passes n_part: expected at most 64, got 65");
  EXPECT_EQ(refusal({1, 4}, {.passes = 2, .staging = kStaging}),
            "reduce_scatter: passes n_part on one node: expected 1, because nothing is kept for "
            "other nodes, got 2");
  EXPECT_EQ(refusal({2, 2}, {.contexts = 0, .staging = kStaging}),
            "reduce_scatter: contexts: expected 1 to 4, got 0");
  EXPECT_EQ(refusal({2, 2}, {.generations = 3, .staging = kStaging}),
            "reduce_scatter: inbox generations n_par: expected 0 (default), 1 or 2, got 3");
  EXPECT_EQ(refusal({2, 2}, {.wave_width = -1, .staging = kStaging}),
            "reduce_scatter: wave width: expected 0 (default) or more, got -1");
  EXPECT_EQ(refusal({2, 2}, {.staging = {1024, 0}}),
            "reduce_scatter: staging slots: expected at least 1, got 0");
  EXPECT_EQ(refusal({2, 2}, {.staging = {8, 1}}),
            "staging slot: expected at least 64 bytes, got 8");
}

TEST(Plan, AWidthThatCollidesNamesTheAllowedOnes) {
  const Topology topology{9, 4};
  const GroupLayout layout("g", {{"p", 80, 2, DType::kBF16}}, topology.Ranks());
  const auto refusal = [&](int width) {
    const ReduceScatterOptions options{
        .placement = Placement::kLatinSquare, .wave_width = width, .staging = {1024, 1}};
    return Refusal(
        [&] { PlanReduceScatter(layout, SpecOf(layout, DType::kBF16), topology, 0, options); });
  };
  EXPECT_EQ(
      refusal(3),
      "latin_square over 9 nodes of 4 local ranks: with wave width 3 contributors 8 and 9 of "
      "one wave meet on one local rank; allowed widths are 1, 2, 4 (every divisor of the local "
      "ranks is)");
  for (const int width : {1, 2, 4}) EXPECT_EQ(refusal(width), "planned");
}

// A program of one chunk asks once a destination; one of many chunks also on the way.
TEST(Plan, InterruptsAreLookedForAmongChunks) {
  struct Enough {};
  const Topology topology{1, 2};
  const GroupLayout layout("g", {{"p", 1 << 13, 64, DType::kBF16}}, 2);
  const auto plan = [&](int64_t slot_bytes, int most) {
    int asked = 0;
    const auto check = [&] {
      if (++asked > most) throw Enough();
    };
    PlanReduceScatter(layout, SpecOf(layout, DType::kBF16), topology, 0,
                      {.staging = {slot_bytes, 1}, .check_interrupt = check});
    return asked;
  };
  EXPECT_EQ(plan(1 << 20, 100), 1);
  EXPECT_GT(plan(64, 100), 4);  // 8192 chunks
  EXPECT_THROW(plan(64, 4), Enough);
}

TEST(StagingSlots, HoldWhatACallStagesButNoMoreThanTheirBounds) {
  const auto slot = [](int64_t staged, const StagingOptions& bounds, int local_ranks) {
    return StagingSlotBytes(staged, bounds, {1, local_ranks}, 1);
  };
  constexpr int64_t kMega = 1 << 20;
  EXPECT_EQ(slot(kMega, {}, 2), kMega);
  EXPECT_EQ(slot(kMega, {4096, 2}, 2), 4096);
  EXPECT_EQ(slot(kMega, {4096 * kMega, 2}, 2), kMega);
  EXPECT_EQ(slot(kMega, {.slot_bytes = 4096, .slots = 2, .node_bytes = 8192}, 2), 4096);
  EXPECT_EQ(slot(kMega, {.slot_bytes = 4096, .slots = 2, .node_bytes = 8192}, 4), 2048);
  EXPECT_EQ(slot(kMega, {.slots = 4}, 2), kMega / 2);
  EXPECT_EQ(slot(0, {.slots = 4}, 2), 2 * kStagingAlignment);
}

TEST(Program, FloorKeepsDataOnly) {
  const Topology topology{1, 3};
  const GroupLayout layout("g", {{"p", 8, 2, DType::kBF16}}, 3);
  const Program floor = WithoutSynchronisation(PlanAllGather(layout, {DType::kF32}, topology, 0));
  ASSERT_EQ(floor.operations.size(), 2U);
  EXPECT_EQ(floor.operations[0].kind, OpKind::kCast);
  EXPECT_EQ(floor.operations[1].kind, OpKind::kMulticast);
}

TEST(Program, PrintsTextAndJson) {
  const Topology topology{1, 2};
  const GroupLayout layout("g", {{"p", 8, 2, DType::kBF16}}, 2);
  const Program program =
      PlanReduceScatter(layout, SpecOf(layout, DType::kBF16), topology, 0, {.staging = {64, 1}});
  EXPECT_NE(ToText(program).find("filled of rank 1"), std::string::npos);
  EXPECT_NE(ToJson(program).find("\"op\": \"sum\""), std::string::npos);
}

}  // namespace
}  // namespace tide
