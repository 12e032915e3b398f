// Tiny programs whose times are computed by hand on a machine of round numbers.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sim/toy.h"
#include "tide/error.h"
#include "tide/sim.h"

namespace tide {
namespace {

using internal::Builder;
using testing::Copy;
using testing::kMicro;
using testing::Put;
using testing::Toy;
using testing::WriteAll;

constexpr double kExact = 1e-12;  // seconds: flows end within a byte
constexpr int64_t kMega = 1000 * 1000;

double Seconds(const std::vector<Program>& programs, const MachineModel& machine = Toy()) {
  return Simulate(programs, machine, {}).seconds;
}

// Seconds of the critical path in which this set the pace.
double LimitOf(const SimulationResult& result, const std::string& name) {
  for (const SimulatedLimit& limit : result.limits) {
    if (limit.name == name) return limit.seconds;
  }
  return 0;
}

// Rank 0 and no other writes.
template <typename Write>
std::vector<Program> OnRankZero(const Topology& topology, const Write& write) {
  return WriteAll(topology, [&](Builder& builder) {
    const int queue = builder.AddQueue("main");
    builder.AddBuffer(BufferKind::kStaging, 0, 100 * kMega);
    if (builder.rank() == 0) write(builder, queue);
  });
}

TEST(Simulate, NothingTakesNoTime) {
  EXPECT_EQ(Seconds(OnRankZero({1, 1}, [](Builder&, int) {})), 0);
}

TEST(Simulate, OneCopyToAPeer) {
  const auto programs = OnRankZero(
      {1, 2}, [](Builder& builder, int queue) { Copy(builder, queue, 1, 0, 2 * kMega); });
  EXPECT_NEAR(Seconds(programs), (1 + 2 + 20) * kMicro, kExact);
}

TEST(Simulate, OneCopyToItself) {
  const auto programs = OnRankZero(
      {1, 1}, [](Builder& builder, int queue) { Copy(builder, queue, 0, 0, 2 * kMega); });
  EXPECT_NEAR(Seconds(programs), (1 + 2 + 10) * kMicro, kExact);
  MachineModel slow = Toy();
  slow.hbm_gb_per_s = 100;  // reads and writes: 50 GB/s of copies
  EXPECT_NEAR(Seconds(programs, slow), (1 + 2 + 40) * kMicro, kExact);
}

TEST(Simulate, PitchedCopies) {
  const auto programs = OnRankZero({1, 2}, [](Builder& builder, int queue) {
    Operation& copy = builder.Add(queue, OpKind::kCopy);
    copy.peer = 1;
    copy.pieces.push_back({{0, 0}, {0, 0}, kMega, 2, 3 * kMega, kMega});
    copy.pieces.push_back({{0, 0}, {0, 0}, kMega, 1, kMega, kMega});
  });
  // The piece of one row is an ordinary copy of a batch of its own.
  EXPECT_NEAR(Seconds(programs), (1 + 2 + 10 + 1 + 3 + 20) * kMicro, kExact);
}

TEST(Simulate, TwoCopiesShareTheWayIn) {
  const auto programs = WriteAll({1, 3}, [](Builder& builder) {
    const int queue = builder.AddQueue("main");
    builder.AddBuffer(BufferKind::kStaging, 0, 100 * kMega);
    if (builder.rank() < 2) Copy(builder, queue, 2, 0, builder.rank() == 0 ? kMega : 3 * kMega);
  });
  const SimulationResult result = Simulate(programs, Toy(), {});
  // Half the rate each until the small one has ended, then all of it.
  EXPECT_NEAR(result.rank_seconds[0], (3 + 20) * kMicro, kExact);
  EXPECT_NEAR(result.rank_seconds[1], (3 + 20 + 20) * kMicro, kExact);
  EXPECT_NEAR(LimitOf(result, "NVLink out"), 20 * kMicro, kExact);
  EXPECT_NEAR(LimitOf(result, "NVLink in"), 20 * kMicro, kExact);
}

TEST(Simulate, BothWaysAtOnceCostNothing) {
  const auto programs = WriteAll({1, 2}, [](Builder& builder) {
    const int queue = builder.AddQueue("main");
    builder.AddBuffer(BufferKind::kStaging, 0, 100 * kMega);
    Copy(builder, queue, 1 - builder.rank(), 0, 2 * kMega);
  });
  EXPECT_NEAR(Seconds(programs), (3 + 20) * kMicro, kExact);
}

TEST(Simulate, WhatALimitedFlowLeavesGoesToTheOthers) {
  // A local copy takes 2 * 200 of 450 GB/s alone; beside a push of 100 it gets the rest.
  MachineModel machine = Toy();
  machine.hbm_gb_per_s = 450;
  const auto programs = OnRankZero({1, 2}, [](Builder& builder, int queue) {
    Copy(builder, queue, 1, 0, 10 * kMega);
    Copy(builder, builder.AddQueue("beside"), 0, 0, 35 * kMega / 2);
  });
  // The lowering joins both queues on the first: an event.
  EXPECT_NEAR(Seconds(programs, machine), (3 + 100 + 7) * kMicro, kExact);
}

TEST(Simulate, AChainOfWaits) {
  constexpr int kRanks = 5;
  const auto programs = WriteAll({1, kRanks}, [](Builder& builder) {
    const int queue = builder.AddQueue("main");
    if (builder.rank() > 0) {
      builder.Wait(queue, {CounterKind::kFilled, builder.rank() - 1}, 1);
      builder.Expect({CounterKind::kFilled, builder.rank() - 1}, 1);
    }
    if (builder.rank() < kRanks - 1) {
      builder.Signal(queue, builder.rank() + 1, CounterKind::kFilled);
    }
  });
  const SimulationResult result = Simulate(programs, Toy(), {});
  const double hop = (4 + 5 + 6) * kMicro;
  for (int rank = 1; rank < kRanks; ++rank) {
    const double signal = rank < kRanks - 1 ? 4 * kMicro : 0;
    EXPECT_NEAR(result.rank_seconds[static_cast<size_t>(rank)], rank * hop + signal, kExact);
  }
  ASSERT_EQ(result.waits.size(), size_t{kRanks - 1});
  EXPECT_EQ(result.waits[0].cause, "rank 0: signal filled to rank 1");
  ASSERT_EQ(result.limits.size(), 1U);
  EXPECT_EQ(result.limits[0].name, "memory operations");
}

TEST(Simulate, AnEventOrdersTwoQueues) {
  const auto programs = OnRankZero({1, 2}, [](Builder& builder, int queue) {
    const int other = builder.AddQueue("other");
    Copy(builder, queue, 1, 0, 2 * kMega);
    const Event copied = builder.NewEvent();
    builder.Record(queue, copied);
    builder.Await(other, copied);
    Copy(builder, other, 1, 0, kMega);
  });
  // The lowering joins both queues on the first: one more event.
  EXPECT_NEAR(Seconds(programs), (3 + 20 + 7 + 3 + 10 + 7) * kMicro, kExact);
}

TEST(Simulate, APipelineOfChunks) {
  constexpr int kChunks = 7;
  const auto pipeline = [](int slots) {
    return WriteAll({1, 2}, [slots](Builder& builder) {
      const int push = builder.AddQueue("push");
      builder.AddBuffer(BufferKind::kStaging, 1, 100 * kMega);
      for (int c = 0; c < kChunks; ++c) {
        if (builder.rank() == 0) {
          if (c >= slots) builder.Wait(push, {CounterKind::kReleased, 1}, c + 1 - slots);
          Copy(builder, push, 1, 0, kMega);
          builder.Signal(push, 1, CounterKind::kFilled);
        } else {
          builder.Wait(push, {CounterKind::kFilled, 0}, c + 1);
          Operation& sum = builder.Add(push, OpKind::kSum);
          sum.sums.push_back({{0, 0}, {{0, 0}, {0, 0}}, 62500, DType::kF32, DType::kF32});
          builder.Signal(push, 0, CounterKind::kReleased);
        }
      }
      builder.Expect(
          {builder.rank() == 0 ? CounterKind::kReleased : CounterKind::kFilled, 1 - builder.rank()},
          kChunks);
    });
  };
  // 2 CTAs of 8, the default: 50 GB/s of read and written bytes.
  const double push = 1 + 2 + 10 + 4;
  const double sum = 6 + 8 + 15 + 4;
  // Enough slots: the sum is slower than the push, so it never waits but for the first chunk.
  EXPECT_NEAR(Seconds(pipeline(kChunks)), (push + 5 + kChunks * sum) * kMicro, kExact);
  // One slot: a chunk is pushed when the one before has been released.
  EXPECT_NEAR(Seconds(pipeline(1)), (kChunks * (push + 5 + sum) + (kChunks - 1) * (5 + 6)) * kMicro,
              kExact);
}

TEST(Simulate, PutsOfAGroupShareTheRail) {
  const auto puts = [](int context) {
    return WriteAll({3, 1}, [context](Builder& builder) {
      const int rail = builder.AddQueue("rail");
      builder.AddBuffer(BufferKind::kOutbox, 0, 100 * kMega);
      if (builder.rank() == 0) {
        Put(builder, rail, 1, 0, 4 * kMega);
        Put(builder, rail, 2, 0, 4 * kMega);
        Put(builder, rail, 1, 0, 2 * kMega, context);
      } else {
        const int pieces = builder.rank() == 1 && context == 0 ? 2 : 1;
        builder.Wait(rail, {CounterKind::kArrived, 0, 0}, pieces);
      }
    });
  };
  // 10 MB at 40 GB/s in all: two flows of 20 GB/s until one has brought its 4 MB ...
  const SimulationResult one = Simulate(puts(0), Toy(), {});
  EXPECT_NEAR(one.rank_seconds[0], (9 + 250) * kMicro, kExact);
  EXPECT_NEAR(one.rank_seconds[2], (9 + 200 + 10 + 11) * kMicro, kExact);
  EXPECT_NEAR(one.rank_seconds[1], (9 + 250 + 10 + 11) * kMicro, kExact);
  // ... or three flows of a third, until the small one has ended.
  const SimulationResult two = Simulate(puts(1), Toy(), {});
  EXPECT_NEAR(two.rank_seconds[0], (9 + 250) * kMicro, kExact);
  EXPECT_NEAR(two.rank_seconds[2], (9 + 250 + 10 + 11) * kMicro, kExact);
}

TEST(Simulate, OperationsOfOneRailRunInTheOrderOfIssue) {
  // Rank 0 waits on one queue before it puts on another: the put comes after what it waits for.
  const auto programs = WriteAll({2, 1}, [](Builder& builder) {
    const int first = builder.AddQueue("first");
    const int second = builder.AddQueue("second");
    builder.AddBuffer(BufferKind::kOutbox, 0, 100 * kMega);
    if (builder.rank() == 0) {
      builder.Wait(first, {CounterKind::kArrived, 1, 0}, 1);
      Put(builder, second, 1, 0, 4 * kMega);
    } else {
      Put(builder, first, 0, 0, 4 * kMega);
    }
  });
  EXPECT_NEAR(Seconds(programs), (9 + 100 + 10 + 11 + 9 + 100 + 7) * kMicro, kExact);
}

TEST(Simulate, SkewOfTheCallersIsPassedOn) {
  const auto programs = WriteAll({1, 2}, [](Builder& builder) {
    const int queue = builder.AddQueue("main");
    builder.Await(queue, {EventKind::kReady});
    builder.Fence(queue, CounterKind::kEntry);
  });
  SimulationOptions options;
  options.ready_s = {0, 1};
  const SimulationResult result = Simulate(programs, Toy(), options);
  EXPECT_NEAR(result.rank_seconds[0], 1 + (7 + 4 + 5 + 6) * kMicro, kExact);
  EXPECT_NEAR(result.rank_seconds[1], 1 + (7 + 4 + 6) * kMicro, kExact);
}

TEST(Simulate, ThePathAddsUpToTheTime) {
  const SimulationResult result = Simulate(testing::ReduceScatters({2, 2}), Toy(), {});
  double limits = 0;
  for (const SimulatedLimit& limit : result.limits) limits += limit.seconds;
  EXPECT_NEAR(limits, result.seconds, kExact);
  ASSERT_FALSE(result.critical_path.empty());
  EXPECT_EQ(result.critical_path.back().end_s, result.seconds);
}

void ExpectRefusal(const std::vector<Program>& programs, const MachineModel& machine,
                   const std::string& part) {
  try {
    Simulate(programs, machine, {});
    FAIL() << "expected a refusal: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Simulate, RefusesWhatNeverRuns) {
  ExpectRefusal(
      WriteAll(
          {1, 2},
          [](Builder& builder) {
            builder.Wait(builder.AddQueue("main"), {CounterKind::kFilled, 1 - builder.rank()}, 1);
          }),
      Toy(), "expected 1 increments, the programs make 0");
  ExpectRefusal(WriteAll({1, 2},
                         [](Builder& builder) {
                           const int queue = builder.AddQueue("main");
                           const int peer = 1 - builder.rank();
                           builder.Wait(queue, {CounterKind::kFilled, peer}, 1);
                           builder.Signal(queue, peer, CounterKind::kFilled);
                         }),
                Toy(), "4 operations never run, first 'wait for filled of rank 1' of rank 0");
}

TEST(Simulate, RefusesAMachineWithoutRates) {
  MachineModel machine = Toy();
  machine.sum_curves.clear();
  ExpectRefusal(testing::AllGathers({1, 2}), machine, "machine 'toy': expected rates of");
}

}  // namespace
}  // namespace tide
