// Every kind of finding in a program that has the mistake, and none in its mended twin.
#include <gtest/gtest.h>

#include "verify/handmade.h"

namespace tide {
namespace {

using testing::Builder;
using testing::Copy;
using testing::kBytes;
using testing::Kinds;
using testing::MakeInput;
using testing::Sum;
using testing::WaitAll;
using testing::WriteAll;
using Found = std::vector<FindingKind>;

constexpr Topology kPair{1, 2};
constexpr Topology kRail{2, 1};

enum class Twin { kBad, kGood };

// Each rank pushes its gradient to its sibling, which adds it to its own.
struct Exchange {
  explicit Exchange(Builder& builder)
      : push(builder.AddQueue("push")),
        sum(builder.AddQueue("sum")),
        gradient(builder.AddBuffer(BufferKind::kGradient, 0, kBytes)),
        staging(builder.AddBuffer(BufferKind::kStaging, 1, kBytes)),
        output(builder.AddBuffer(BufferKind::kOutput, 0, kBytes)),
        peer(1 - builder.rank()) {}

  void Push(Builder& builder) const {
    Copy(builder, push, peer, {staging, 0}, {gradient, 0});
    builder.Signal(push, peer, CounterKind::kFilled);
  }
  void Add(Builder& builder) const {
    Sum(builder, sum, {output, 0}, {{staging, 0}, {gradient, 0}});
  }

  int push;
  int sum;
  int gradient;
  int staging;
  int output;
  int peer;
};

std::vector<Program> ExchangePrograms(const std::function<void(Builder&, const Exchange&)>& rest) {
  return WriteAll(kPair, [&](Builder& builder) {
    const Exchange exchange(builder);
    builder.Await(exchange.push, {EventKind::kReady});
    builder.Await(exchange.sum, {EventKind::kReady});
    rest(builder, exchange);
  });
}

Found Unordered(Twin twin) {
  return Kinds(MakeInput(ExchangePrograms([&](Builder& builder, const Exchange& x) {
    x.Push(builder);
    if (twin == Twin::kGood) {
      WaitAll(builder, x.sum, {CounterKind::kFilled, x.peer}, 1);
    } else {
      builder.Expect({CounterKind::kFilled, x.peer}, 1);
    }
    x.Add(builder);
  })));
}

TEST(Findings, UnorderedAccessesAreARace) {
  const Found found = Unordered(Twin::kBad);
  EXPECT_NE(std::find(found.begin(), found.end(), FindingKind::kRace), found.end());
  EXPECT_EQ(Unordered(Twin::kGood), Found());
}

Found Paced(Sync sync) {
  return Kinds(MakeInput(ExchangePrograms([&](Builder& builder, const Exchange& x) {
    Copy(builder, x.push, x.peer, {x.staging, 0}, {x.gradient, 0});
    builder.Signal(x.push, x.peer, CounterKind::kFilled).sync = sync;
    builder.Wait(x.sum, {CounterKind::kFilled, x.peer}, 1).sync = sync;
    builder.Expect({CounterKind::kFilled, x.peer}, 1);
    x.Add(builder);
  })));
}

TEST(Findings, PacingOrdersNothing) {
  const Found found = Paced(Sync::kPacing);
  EXPECT_NE(std::find(found.begin(), found.end(), FindingKind::kRace), found.end());
  EXPECT_EQ(Paced(Sync::kSafety), Found());
}

// The slot is used again in the next call: its reader must have released it.
Found Reused(Twin twin, bool predecessor) {
  auto input = MakeInput(ExchangePrograms([&](Builder& builder, const Exchange& x) {
                           if (twin == Twin::kGood) {
                             builder.Wait(x.push, {CounterKind::kReleased, x.peer}, 0);
                           }
                           x.Push(builder);
                           WaitAll(builder, x.sum, {CounterKind::kFilled, x.peer}, 1);
                           x.Add(builder);
                           builder.Signal(x.sum, x.peer, CounterKind::kReleased);
                           builder.Expect({CounterKind::kReleased, x.peer}, 1);
                         }),
                         2);
  input.calls[0].predecessor = predecessor;
  return Kinds(input);
}

TEST(Findings, ReuseWithoutReleaseIsARace) {
  for (const bool predecessor : {false, true}) {
    EXPECT_EQ(Reused(Twin::kBad, predecessor).front(), FindingKind::kRace);
    EXPECT_EQ(Reused(Twin::kGood, predecessor), Found());
  }
}

// A predecessor's access counts for the whole region, wherever the program itself touches it.
TEST(Findings, PredecessorTouchesEverything) {
  const auto programs = [](int64_t offset) {
    return WriteAll({1, 1}, [&](Builder& builder) {
      const int a = builder.AddQueue(offset == 0 ? "a" : "b");
      const int staging = builder.AddBuffer(BufferKind::kStaging, 1, 2 * kBytes);
      Operation& zero = builder.Add(a, OpKind::kZero);
      zero.pieces.push_back({{staging, offset}, {staging, offset}, kBytes});
    });
  };
  auto input = MakeInput(programs(0), 2);
  input.calls[1].programs = MakeInput(programs(kBytes)).calls[0].programs;
  EXPECT_EQ(Kinds(input), Found());
  input.calls[0].predecessor = true;
  EXPECT_EQ(Kinds(input), Found{FindingKind::kRace});
}

Found Crossed(Twin twin) {
  return Kinds(MakeInput(WriteAll(kPair, [&](Builder& builder) {
    const int queue = builder.AddQueue("main");
    const int peer = 1 - builder.rank();
    if (twin == Twin::kGood) builder.Signal(queue, peer, CounterKind::kEntry);
    WaitAll(builder, queue, {CounterKind::kEntry, peer}, 1);
    if (twin == Twin::kBad) builder.Signal(queue, peer, CounterKind::kEntry);
  })));
}

TEST(Findings, CrossedWaitsAreStuck) {
  EXPECT_EQ(Crossed(Twin::kBad), Found{FindingKind::kStuck});
  EXPECT_EQ(Crossed(Twin::kGood), Found());
}

// Two queues that need each other in an order that one FIFO does not have.
TEST(Findings, EnqueueOrderMustNotBlock) {
  const auto find = [](Twin twin) {
    return verify::Verify(MakeInput(WriteAll({1, 1},
                                             [&](Builder& builder) {
                                               const int a = builder.AddQueue("a");
                                               const int b = builder.AddQueue("b");
                                               const Event event = builder.NewEvent();
                                               if (twin == Twin::kGood) builder.Record(b, event);
                                               builder.Await(a, event);
                                               if (twin == Twin::kBad) builder.Record(b, event);
                                             })),
                          {});
  };
  const VerifyResult bad = find(Twin::kBad);
  ASSERT_EQ(bad.findings.size(), 1U);
  EXPECT_EQ(bad.findings[0].kind, FindingKind::kStuck);
  EXPECT_NE(bad.findings[0].detail.find("FIFO"), std::string::npos);
  EXPECT_TRUE(find(Twin::kGood).ok());
}

TEST(Findings, IncrementsMustBeDeclared) {
  const auto find = [](int64_t declared) {
    return Kinds(MakeInput(WriteAll(kPair, [&](Builder& builder) {
      const int queue = builder.AddQueue("main");
      const int peer = 1 - builder.rank();
      builder.Signal(queue, peer, CounterKind::kEntry);
      builder.Wait(queue, {CounterKind::kEntry, peer}, 1);
      builder.Expect({CounterKind::kEntry, peer}, declared);
    })));
  };
  EXPECT_EQ(find(2), Found{FindingKind::kUnbalanced});
  EXPECT_EQ(find(1), Found());
}

TEST(Findings, PiecesStayInTheirBuffers) {
  const auto find = [](int64_t rows) {
    return Kinds(MakeInput(WriteAll({1, 1}, [&](Builder& builder) {
      const int queue = builder.AddQueue("main");
      const int staging = builder.AddBuffer(BufferKind::kStaging, 1, kBytes);
      Operation& zero = builder.Add(queue, OpKind::kZero);
      zero.pieces.push_back({{staging, 0}, {staging, 0}, 16, rows, 16, 16});
    })));
  };
  EXPECT_EQ(find(5), Found{FindingKind::kOutOfBounds});
  EXPECT_EQ(find(4), Found());
}

TEST(Findings, PutsGoAlongTheRail) {
  const auto find = [](int distance) {
    return Kinds(MakeInput(WriteAll({2, 2}, [&](Builder& builder) {
      const int queue = builder.AddQueue("rail");
      const int outbox = builder.AddBuffer(BufferKind::kOutbox, 0, kBytes);
      const int inbox = builder.AddBuffer(BufferKind::kInbox, 0, kBytes);
      Operation& put = builder.Add(queue, OpKind::kPut);
      put.peer = (builder.rank() + distance) % 4;
      put.puts.push_back({{inbox, 0}, {outbox, 0}, kBytes});
      const int sender = (builder.rank() + 4 - distance) % 4;
      WaitAll(builder, queue, {CounterKind::kArrived, sender}, 1);
    })));
  };
  EXPECT_EQ(find(1), Found{FindingKind::kMalformed});
  EXPECT_EQ(find(2), Found());
}

TEST(Findings, OneQueueWaitsForACounter) {
  const auto find = [](bool same_queue) {
    return Kinds(MakeInput(WriteAll(kPair, [&](Builder& builder) {
      const int a = builder.AddQueue("a");
      const int b = builder.AddQueue("b");
      const int peer = 1 - builder.rank();
      for (int i = 0; i < 2; ++i) builder.Signal(a, peer, CounterKind::kEntry);
      builder.Wait(a, {CounterKind::kEntry, peer}, 1);
      builder.Wait(same_queue ? a : b, {CounterKind::kEntry, peer}, 2);
      builder.Expect({CounterKind::kEntry, peer}, 2);
    })));
  };
  EXPECT_EQ(find(false), Found{FindingKind::kMalformed});
  EXPECT_EQ(find(true), Found());
}

// A put of two pieces, then what `rest` does on the receiver's queue.
std::vector<Program> PutPrograms(int second_context, int puts, CounterKind awaited, int64_t value) {
  return WriteAll(kRail, [&](Builder& builder) {
    const int rail = builder.AddQueue("rail");
    const int land = builder.AddQueue("land");
    const int gradient = builder.AddBuffer(BufferKind::kGradient, 0, kBytes);
    const int outbox = builder.AddBuffer(BufferKind::kOutbox, 0, kBytes);
    const int inbox = builder.AddBuffer(BufferKind::kInbox, 0, kBytes * puts);
    const int output = builder.AddBuffer(BufferKind::kOutput, 0, kBytes);
    const int peer = 1 - builder.rank();
    builder.Await(rail, {EventKind::kReady});
    Copy(builder, rail, builder.rank(), {outbox, 0}, {gradient, 0});
    for (int i = 0; i < puts; ++i) {
      const int64_t at = i * kBytes;
      Operation& put = builder.Add(rail, OpKind::kPut);
      put.peer = peer;
      put.puts.push_back({{inbox, at}, {outbox, 0}, 32, 0, CounterKind::kHead});
      put.puts.push_back({{inbox, at + 32}, {outbox, 32}, 32, second_context});
    }
    builder.Signal(rail, peer, CounterKind::kFilled);
    builder.Wait(land, {awaited, peer}, value);
    Sum(builder, land, {output, 0}, {{inbox, 0}});
    builder.Expect({CounterKind::kHead, peer}, puts);
    builder.Expect({CounterKind::kArrived, peer}, puts);
    builder.Expect({CounterKind::kFilled, peer}, 1);
  });
}

TEST(Findings, PutsArriveInOrderOnOneContextOnly) {
  EXPECT_EQ(Kinds(MakeInput(PutPrograms(0, 1, CounterKind::kArrived, 1))), Found());
  EXPECT_EQ(Kinds(MakeInput(PutPrograms(1, 1, CounterKind::kArrived, 1))),
            Found{FindingKind::kRace});
}

TEST(Findings, ASignalDoesNotWaitForPuts) {
  EXPECT_EQ(Kinds(MakeInput(PutPrograms(0, 1, CounterKind::kFilled, 1))),
            Found{FindingKind::kRace});
}

// Three increments of one counter on two contexts; the first two are not known to be the first
// put's.
TEST(Findings, APutMustNotOvertakeAnother) {
  const auto find = [](int second_context) {
    return Kinds(MakeInput(WriteAll(kRail, [&](Builder& builder) {
      const int rail = builder.AddQueue("rail");
      const int land = builder.AddQueue("land");
      const int outbox = builder.AddBuffer(BufferKind::kOutbox, 0, kBytes);
      const int inbox = builder.AddBuffer(BufferKind::kInbox, 0, kBytes);
      const int peer = 1 - builder.rank();
      for (int i = 0; i < 2; ++i) {
        Operation& put = builder.Add(rail, OpKind::kPut);
        put.peer = peer;
        put.puts.push_back({{inbox, i * 32}, {outbox, 0}, 32, i * second_context});
      }
      builder.Wait(land, {CounterKind::kArrived, peer}, 1);
      builder.Expect({CounterKind::kArrived, peer}, 2);
    })));
  };
  EXPECT_EQ(find(1), Found{FindingKind::kAmbiguous});
  EXPECT_EQ(find(0), Found());
}

// The landing of a switch takes the blocks of all ranks: of those not listed, only zeros.
TEST(Findings, UnlistedBlocksMustBeZero) {
  const auto find = [](bool cleared) {
    return Kinds(MakeInput(WriteAll(kPair, [&](Builder& builder) {
      const int queue = builder.AddQueue("land");
      const int gradient = builder.AddBuffer(BufferKind::kGradient, 0, kBytes);
      const int inbox = builder.AddBuffer(BufferKind::kInbox, 0, kBytes);
      const int output = builder.AddBuffer(BufferKind::kOutput, 0, kBytes);
      const int peer = 1 - builder.rank();
      builder.Await(queue, {EventKind::kReady});
      if (builder.rank() == 0) {
        Copy(builder, queue, 0, {inbox, 0}, {gradient, 0});
      } else if (cleared) {
        Operation& zero = builder.Add(queue, OpKind::kZero);
        zero.pieces.push_back({{inbox, 0}, {inbox, 0}, kBytes});
      }
      builder.Signal(queue, peer, CounterKind::kPlaced);
      WaitAll(builder, queue, {CounterKind::kPlaced, peer}, 1);
      Operation& land = builder.Add(queue, OpKind::kLand);
      land.lands.push_back({{output, 0}, {inbox, 0}, {0}, kBytes / 4});
    })));
  };
  EXPECT_EQ(find(false), Found{FindingKind::kWrongValue});
  EXPECT_EQ(find(true), Found());
}

TEST(Findings, OperandsMustBeTheSameElement) {
  const auto find = [](int64_t offset) {
    return Kinds(MakeInput(WriteAll({1, 1}, [&](Builder& builder) {
      const int queue = builder.AddQueue("sum");
      const int gradient = builder.AddBuffer(BufferKind::kGradient, 0, kBytes);
      const int output = builder.AddBuffer(BufferKind::kOutput, 0, kBytes);
      builder.Await(queue, {EventKind::kReady});
      Sum(builder, queue, {output, 0}, {{gradient, 0}, {gradient, offset}}, kBytes / 2);
    })));
  };
  EXPECT_EQ(find(4), Found{FindingKind::kWrongValue});
  EXPECT_EQ(find(0), Found());
}

// A rank looks at its own part of its own landing, and takes its siblings' for the same.
TEST(Findings, RefreshedLandingsMustBeAlike) {
  const auto find = [](BufferKind kind, bool alike) {
    return Kinds(MakeInput(WriteAll(kPair, [&](Builder& builder) {
      const int queue = builder.AddQueue("main");
      const int gradient = builder.AddBuffer(BufferKind::kGradient, 0, kBytes);
      const int landing = builder.AddBuffer(kind, 0, 2 * kBytes);
      const Ref part{landing, builder.rank() * kBytes};
      builder.Await(queue, {EventKind::kReady});
      Copy(builder, queue, builder.rank(), part, {gradient, 0});
      if (alike) Copy(builder, queue, 1 - builder.rank(), part, {gradient, 0});
      builder.Add(queue, OpKind::kRefresh).casts = {{part, {gradient, 0}, kBytes / 4}};
    })));
  };
  EXPECT_EQ(find(BufferKind::kLanding, false), Found{FindingKind::kWrongValue});
  EXPECT_EQ(find(BufferKind::kOutput, false), Found{FindingKind::kMalformed});
  EXPECT_EQ(find(BufferKind::kLanding, true), Found());
}

TEST(Findings, TextNamesBothOperationsAndTheBytes) {
  const auto input = MakeInput(ExchangePrograms([&](Builder& builder, const Exchange& x) {
    x.Push(builder);
    builder.Expect({CounterKind::kFilled, x.peer}, 1);
    x.Add(builder);
  }));
  const std::string text = ToText(verify::Verify(input, {}));
  EXPECT_NE(text.find("race: "), std::string::npos) << text;
  EXPECT_NE(text.find("call 0, rank 0: sum sum 1 pieces, 16 elements"), std::string::npos) << text;
  EXPECT_NE(text.find("call 0, rank 1: push copy 1 pieces, 64 bytes to rank 0"), std::string::npos)
      << text;
  EXPECT_NE(text.find("at bytes [0, 64) of staging[1] of rank 0"), std::string::npos) << text;
}

}  // namespace
}  // namespace tide
