#include "plan/sizing.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "plan/memory_model.h"
#include "plan/reduction_shape.h"
#include "plan/shard_span.h"
#include "testing/cases.h"
#include "tide/error.h"

namespace tide {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

SizedGroup Group(const Topology& topology, const std::vector<ParamShape>& shapes,
                 const std::string& name = "layer") {
  SizedGroup group{GroupLayout(name, shapes, topology.Ranks()), {}, {}};
  for (size_t p = 0; p < shapes.size(); ++p) {
    group.shard_dtypes.push_back(shapes[p].dtype);
    group.spec.params.push_back(static_cast<int>(p));
    group.spec.grad_dtypes.push_back(shapes[p].dtype);
  }
  return group;
}

// One bf16 parameter with S_fp32 = fp32_bytes.
SizedGroup GroupOf(const Topology& topology, int64_t fp32_bytes,
                   const std::string& name = "layer") {
  return Group(topology, {{"weight", topology.Ranks(), fp32_bytes / 4, DType::kBF16}}, name);
}

SizingRequest Request(const Topology& topology, int64_t fp32_bytes) {
  SizingRequest request;
  request.topology = topology;
  request.machine = MachinePreset("paper-8-nodes");
  request.groups.push_back(GroupOf(topology, fp32_bytes));
  return request;
}

std::string WhyOf(const Sizing& sizing, const std::string& what) {
  for (const Choice& choice : sizing.choices) {
    if (choice.what == what) return choice.why;
  }
  return "no choice of " + what;
}

// The message of the error that the request ends in.
std::string Refusal(const SizingRequest& request) {
  try {
    ChooseSizes(request);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

double OfFull(int64_t bytes, const Sizing& sizing) {
  return static_cast<double>(bytes) / static_cast<double>(sizing.full_landing_bytes);
}

// Paper, section 6.3 and appendix G.
TEST(Sizing, EightNodesOfThePaperTakeFourOfEach) {
  for (const int64_t fp32_bytes : {32 * kMiB, 128 * kMiB}) {
    const Sizing sizing = ChooseSizes(Request({8, 8}, fp32_bytes));
    EXPECT_EQ(sizing.reduce_scatter.round_width, 4);
    EXPECT_EQ(sizing.sum_ctas, 4);
    EXPECT_EQ(sizing.landing_ctas, 4);
    EXPECT_EQ(sizing.reduce_scatter.placement, Placement::kLatinSquare);
    EXPECT_EQ(sizing.reduce_scatter.mode, Mode::kInPlace);
    EXPECT_EQ(sizing.reduce_scatter.passes, 1);
    EXPECT_EQ(sizing.outbox_depth, 7);
    EXPECT_EQ(sizing.generations, 1);
  }
}

// Paper, section 5.4: to the printed digits.
TEST(Sizing, SixtyFourNodesHoldWhatThePaperPrints) {
  SizingRequest request = Request({64, 8}, 8 * kMiB);
  request.mode = Mode::kInPlace;
  const Sizing in_place = ChooseSizes(request);
  EXPECT_EQ(in_place.reduce_scatter.round_width, 4);
  EXPECT_EQ(in_place.generations, 2);
  EXPECT_NEAR(OfFull(in_place.formula.regions.reduce_scatter(), in_place), 0.594, 0.0005);
  EXPECT_NEAR(OfFull(in_place.formula.live(), in_place), 3.72, 0.005);
  request.mode = Mode::kSlotReuse;
  const Sizing slot_reuse = ChooseSizes(request);
  EXPECT_NEAR(OfFull(slot_reuse.formula.regions.reduce_scatter(), slot_reuse), 0.164, 0.0005);
  EXPECT_NEAR(OfFull(slot_reuse.formula.live(), slot_reuse), 2.29, 0.005);
  EXPECT_NEAR(OfFull(slot_reuse.stock_live_bytes, slot_reuse), 4.0, 1e-9);
  // Chunks of a fixed size leave little of the staging (paper: 0.56).
  request.mode = Mode::kInPlace;
  request.chunk_bytes = kMiB / 64;
  const Sizing chunked = ChooseSizes(request);
  EXPECT_NEAR(OfFull(chunked.reserved.regions.reduce_scatter(), chunked), 0.56, 0.005);
}

TEST(Sizing, OwnRegionsStayBelowTheFormula) {
  const std::vector<Topology> topologies = {{1, 8}, {2, 4},  {3, 8}, {8, 8},
                                            {9, 8}, {64, 8}, {5, 1}, {12, 1}};
  for (const Topology& topology : topologies) {
    for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
      for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
        for (const int passes : {1, 2, 3, 4}) {
          if (passes > 1 && topology.nodes == 1) continue;
          SizingRequest request = Request(topology, 3 * kMiB);
          request.placement = placement;
          request.mode = mode;
          request.passes = passes;
          const Sizing sizing = ChooseSizes(request);
          const RegionBytes& own = sizing.reserved.regions;
          const RegionBytes& formula = sizing.formula.regions;
          // Sub-slices and passes begin on a boundary of 128 bytes, in each row of a block.
          const int64_t slack = 256 * topology.local_ranks * (sizing.outbox_depth + 16);
          EXPECT_LE(own.staging, formula.staging + slack);
          EXPECT_LE(own.outbox, formula.outbox + slack);
          EXPECT_LE(own.spare, formula.spare + slack);
          EXPECT_LE(own.inbox, formula.inbox + slack);
          EXPECT_LE(own.stage, formula.stage);
          EXPECT_EQ(own.generations, formula.generations);
          EXPECT_EQ(own.accumulator, formula.accumulator);
          // And not far below, but for the slot that equation 10 counts for the own rank.
          EXPECT_GE(own.outbox, formula.outbox);
          EXPECT_GE(own.inbox, formula.inbox);
          EXPECT_GE(own.staging * topology.local_ranks,
                    formula.staging * (topology.local_ranks - 1));
        }
      }
    }
  }
}

TEST(Sizing, CountsOutboxAndGenerationsAsThePlannerDoes) {
  for (const int nodes : {2, 3, 8, 9, 17}) {
    for (const int local : {1, 8}) {
      for (const int k : {1, 2, 3, 4}) {
        if (k >= nodes) continue;  // refused
        for (const int passes : {1, 2, 3}) {
          for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
            SizingRequest request = Request({nodes, local}, kMiB);
            request.round_width = k;
            request.passes = passes;
            request.mode = mode;
            const Sizing sizing = ChooseSizes(request);
            const SizedGroup& group = request.groups[0];
            const internal::ShardSpan span(group.layout, group.spec);
            const internal::ReductionShape shape(span, group.spec, request.topology,
                                                 sizing.reduce_scatter);
            EXPECT_EQ(sizing.outbox_depth, shape.outbox_blocks());
            EXPECT_EQ(sizing.generations, shape.generations());
          }
        }
      }
    }
  }
}

TEST(Sizing, WholeBlocksAreOneChunk) {
  for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
    for (const auto& shape : testing::ShapeCases()) {
      const Topology topology{3, 2};
      SizingRequest request = Request(topology, kMiB);
      request.groups = {Group(topology, testing::MakeShapes(shape, DType::kBF16))};
      request.placement = placement;
      request.round_width = 1;
      const Sizing sizing = ChooseSizes(request);
      const Program program = PlanReduceScatter(request.groups[0].layout, request.groups[0].spec,
                                                topology, 0, sizing.reduce_scatter);
      int64_t filled = 0;
      for (const Operation& op : program.operations) {
        filled += op.kind == OpKind::kSignal && op.counter.kind == CounterKind::kFilled ? 1 : 0;
      }
      EXPECT_EQ(filled, 3) << shape.name;  // two remote nodes and the own one, one sibling
    }
  }
}

TEST(Sizing, WithoutReductionInTheSwitchPlacesDirectly) {
  SizingRequest request = Request({8, 8}, 32 * kMiB);
  request.machine.multicast_reduction = false;
  const Sizing sizing = ChooseSizes(request);
  EXPECT_EQ(sizing.reduce_scatter.placement, Placement::kDirect);
  EXPECT_TRUE(Contains(WhyOf(sizing, "placement"), "no reduction through the switch"));
  request.placement = Placement::kLatinSquare;
  EXPECT_TRUE(Contains(Refusal(request), "allowed: direct"));
}

TEST(Sizing, MemoryDecidesTheModeThenChunksThenPasses) {
  SizingRequest request = Request({64, 8}, 64 * kMiB);
  const int64_t in_place = ChooseSizes(request).reserved.live();
  request.memory_limit_bytes = in_place - 40 * kMiB;
  EXPECT_EQ(ChooseSizes(request).reduce_scatter.mode, Mode::kInPlace);
  EXPECT_LT(ChooseSizes(request).reduce_scatter.staging.slot_bytes, 32 * kMiB);
  request.memory_limit_bytes = in_place - 1000 * kMiB;
  Sizing sizing = ChooseSizes(request);
  EXPECT_EQ(sizing.reduce_scatter.mode, Mode::kSlotReuse);
  EXPECT_EQ(sizing.reduce_scatter.passes, 1);
  EXPECT_TRUE(Contains(WhyOf(sizing, "mode"), "allowed"));

  bool more_passes = false;
  for (int64_t limit = sizing.reserved.live(); limit > 0; limit -= 64 * kMiB) {
    request.memory_limit_bytes = limit;
    try {
      sizing = ChooseSizes(request);
    } catch (const Error& error) {
      EXPECT_TRUE(Contains(error.what(), "memory limit"));
      EXPECT_TRUE(Contains(error.what(), "4 passes") ||
                  Contains(error.what(), "the all-gather alone"));
      EXPECT_TRUE(more_passes) << "passes were not tried";
      return;
    }
    EXPECT_LE(sizing.reserved.live(), limit);
    more_passes |= sizing.reduce_scatter.passes > 1;
  }
  FAIL() << "a limit of nothing was met";
}

TEST(Sizing, RefusesALimitBelowTheLandingsByName) {
  SizingRequest request = Request({64, 8}, 64 * kMiB);
  request.memory_limit_bytes = kMiB;
  const std::string message = Refusal(request);
  EXPECT_TRUE(Contains(message, "the all-gather alone takes")) << message;
  EXPECT_TRUE(Contains(message, "receive stage")) << message;
  request.memory_limit_bytes = ChooseSizes(Request({64, 8}, 64 * kMiB)).reserved.live() / 4 * 3;
  request.mode = Mode::kInPlace;
  EXPECT_TRUE(Contains(Refusal(request), "allow slot_reuse"));
}

TEST(Sizing, SmallerGroupsTakeFewerPasses) {
  const Topology topology{16, 8};
  SizingRequest request = Request(topology, 64 * kMiB);
  request.groups.push_back(GroupOf(topology, 16 * kMiB, "small"));
  const Sizing free = ChooseSizes(request);
  EXPECT_EQ(free.passes, (std::vector<int>{1, 1}));
  SizingRequest tight = request;
  tight.mode = Mode::kSlotReuse;
  tight.memory_limit_bytes = 1;
  // The smallest limit that is met takes the most passes.
  for (int64_t limit = free.reserved.live();; limit -= 16 * kMiB) {
    SizingRequest next = tight;
    next.memory_limit_bytes = limit;
    try {
      ChooseSizes(next);
      tight = next;
    } catch (const Error&) {
      break;
    }
  }
  const Sizing sizing = ChooseSizes(tight);
  EXPECT_GT(sizing.passes[0], 1);
  EXPECT_LT(sizing.passes[1], sizing.passes[0]);
  // The lane's blocks are those of the largest group.
  ReduceScatterOptions options = sizing.reduce_scatter;
  options.passes = sizing.passes[1];
  const SizedGroup& small = tight.groups[1];
  EXPECT_LE(ReduceScatterRegions(small.layout, small.spec, topology, options).inbox,
            sizing.reserved.regions.inbox);
}

TEST(Sizing, NamesTheRuleAndWhatIsAllowed) {
  const auto refusal = [](const std::function<void(SizingRequest&)>& spoil) {
    SizingRequest request = Request({9, 8}, kMiB);
    spoil(request);
    return Refusal(request);
  };
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.wave_width = 3; }),
                       "contributors 8 and 9 of one wave would meet on one local rank"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.wave_width = 3; }), "allowed: 1, 2, 4, 8"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.wave_width = 9; }), "allowed: 1, 2, 4, 8"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.wave_width = 0; }), "allowed: 1, 2, 4, 8"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.round_width = 0; }),
                       "round width k: expected at least 1, got 0; allowed: 1 to 8"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.round_width = 9; }),
                       "round width k: expected at most max(1, M-1) = 8, got 9; allowed: 1 to 8"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.passes = 0; }), "passes: expected at least 1"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.passes = 65; }), "passes: expected at most 64"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.chunk_bytes = 1; }), "chunk: expected at least"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.topology = {1, 1}; }), "at least 2 ranks"));
  EXPECT_TRUE(Contains(refusal([](auto& r) {
                         r.topology = {8, 9};
                         r.topology.nodes = 7;
                       }),
                       "expected a layout over 7 x 9 = 63 ranks, got 72"));
  EXPECT_TRUE(Contains(refusal([](auto& r) { r.groups.clear(); }), "expected at least one"));
  EXPECT_TRUE(Contains(refusal([](auto& r) {
                         r.mode = Mode::kSlotReuse;
                         r.groups[0].spec.grad_dtypes[0] = DType::kF32;
                       }),
                       "slot_reuse: needs gradients in the all-gather dtype"));
}

TEST(Sizing, SlotReuseIsNotChosenForOtherGradientDtypes) {
  SizingRequest request = Request({64, 8}, 8 * kMiB);
  request.groups[0].spec.grad_dtypes[0] = DType::kF32;
  EXPECT_EQ(ChooseSizes(request).reduce_scatter.mode, Mode::kInPlace);
}

TEST(Sizing, ACastTakesOneMoreSlotOfTheStage) {
  SizingRequest request = Request({4, 2}, kMiB);
  const Sizing resident = ChooseSizes(request);
  EXPECT_TRUE(resident.all_gather.resident);
  request.groups[0].shard_dtypes[0] = DType::kF32;
  const Sizing cast = ChooseSizes(request);
  EXPECT_FALSE(cast.all_gather.resident);
  EXPECT_EQ(cast.reserved.regions.stage * 3, resident.reserved.regions.stage * 4);
}

TEST(RoundWidth, DoublesOnlyWhereItSavesWaits) {
  MachineModel machine = MachinePreset("paper-8-nodes");
  const double wire = 5e-3;
  EXPECT_EQ(internal::ChooseRoundWidth(machine, {2, 8}, 8, 1, wire).k, 1);
  EXPECT_EQ(internal::ChooseRoundWidth(machine, {8, 8}, 8, 1, wire).k, 4);
  EXPECT_EQ(internal::ChooseRoundWidth(machine, {8, 8}, 8, 1, wire).rounds, 2);
  // Waves of two hold at most two transfers: four would save nothing.
  EXPECT_EQ(internal::ChooseRoundWidth(machine, {8, 8}, 2, 1, wire).k, 2);
  // 4 rounds of 0.1 ms are within a tenth of 5 ms.
  machine.round_wait_ms = 0.1;
  EXPECT_EQ(internal::ChooseRoundWidth(machine, {8, 8}, 8, 1, wire).k, 2);
  EXPECT_EQ(internal::ChooseRoundWidth(machine, {8, 8}, 8, 2, wire).k, 4) << "of two passes";
  machine.round_wait_ms = 1.3;
  machine.max_round_width = 8;
  EXPECT_EQ(internal::ChooseRoundWidth(machine, {8, 8}, 8, 1, wire).k, 8);
}

TEST(Budgets, FollowTheirEquations) {
  const MachineModel machine = MachinePreset("paper-8-nodes");
  // ceil(1.5 * (8 * 4 / 4 + 1) * 47.5 / 99) for fp32 gradients.
  EXPECT_EQ(internal::SumCtas(machine, {8, 8}, 4), 7);
  // ceil(S / (0.05 * t * 21e9)) below the ceiling of four: 63 steps on the wire leave time.
  const internal::GroupBytes bytes{.fp32 = 32 * kMiB, .grad = 16 * kMiB};
  const double wire = internal::WireSeconds(machine, {64, 8}, bytes);
  EXPECT_NEAR(wire, 63.0 * 32 * kMiB / 47.5e9, 1e-12);
  EXPECT_EQ(internal::LandingCtas(machine, wire, bytes.fp32, 1), 1);
  EXPECT_EQ(internal::LandingCtas(machine, wire / 32, bytes.fp32, 1), 4);
  EXPECT_EQ(internal::LandingCtas(machine, wire / 32, bytes.fp32, 16), 2);
}

TEST(Connections, GrowWithNodesNotRanks) {
  const LaneConnections lane = ConnectionsOf({64, 8}, 4);
  EXPECT_EQ(lane.queue_pairs, 2 * 4 * 63);
  EXPECT_EQ(lane.queue_pairs_all, 2 * 4 * 511);
  EXPECT_EQ(lane.barrier_steps_all, 64 * lane.barrier_steps);
  EXPECT_EQ(lane.progress_threads, 1);
  EXPECT_EQ(ConnectionsOf({1, 8}, 4).progress_threads, 0);
}

TEST(CountProgram, CountsPiecesNotOperations) {
  Program program;
  program.rank = 1;
  const auto add = [&program](OpKind kind) -> Operation& {
    program.operations.emplace_back().kind = kind;
    return program.operations.back();
  };
  add(OpKind::kCopy).pieces.resize(3);
  add(OpKind::kMulticast).pieces.resize(2);
  add(OpKind::kZero).pieces.resize(4);
  PutPiece piece;
  piece.bytes = 10;
  add(OpKind::kPut).puts = {piece, piece};
  add(OpKind::kSum).sums.resize(5);
  add(OpKind::kLand).lands.resize(7);
  add(OpKind::kSignal).peer = 0;
  add(OpKind::kSignal).peer = 1;  // own: no message
  add(OpKind::kWait);
  const ProgramCounts counts = CountProgram(program);
  EXPECT_EQ(counts.operations, 9);
  EXPECT_EQ(counts.descriptors, 5);
  EXPECT_EQ(counts.zeroed_pieces, 4);
  EXPECT_EQ(counts.transfers, 1);
  EXPECT_EQ(counts.puts, 2);
  EXPECT_EQ(counts.put_bytes, 20);
  EXPECT_EQ(counts.sums, 5);
  EXPECT_EQ(counts.landings, 1);
  EXPECT_EQ(counts.signals, 1);
  EXPECT_EQ(counts.waits, 1);
}

}  // namespace
}  // namespace tide
