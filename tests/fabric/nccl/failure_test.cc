// What goes wrong on the nccl fabric, and what it says.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fabric/nccl/fake.h"
#include "fabric/nccl/nccl_fabric.h"
#include "fabric/nccl/test_bed.h"
#include "testing/ranks.h"
#include "tide/error.h"

namespace tide {
namespace {

using testing::FakeParts;
using testing::FakeWorld;
using testing::Order;
using testing::RunRanks;

CommunicatorOptions Options() {
  CommunicatorOptions options;
  options.timeout = std::chrono::seconds(30);
  return options;
}

// What each rank's `body` throws, empty for nothing.
struct Outcome {
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
};
std::vector<Outcome> Outcomes(int world, const std::function<void(Bootstrap&)>& body) {
  std::vector<Outcome> outcomes(static_cast<size_t>(world));
  RunRanks(world, [&](Bootstrap& bootstrap) {
    try {
      body(bootstrap);
    } catch (const Error& error) {
      outcomes[static_cast<size_t>(bootstrap.rank())] = {error.code(), error.what()};
    }
  });
  return outcomes;
}

std::vector<Outcome> Construct(int lacking) {
  const auto world = std::make_shared<FakeWorld>(3, 1, Order::kStreams);
  return Outcomes(3, [&](Bootstrap& bootstrap) {
    nccl::NcclFabric fabric(bootstrap, Options(), [&]() -> nccl::Parts {
      if (bootstrap.rank() < lacking) {
        throw Error(ErrorCode::kUnsupported, "expected NCCL 2.31.2 or newer, got 2.28.9");
      }
      return FakeParts(world, bootstrap.rank())();
    });
  });
}

TEST(NcclFailure, MissingEverywhereIsAReason) {
  for (const Outcome& outcome : Construct(3)) {
    EXPECT_EQ(outcome.code, ErrorCode::kUnsupported);
    EXPECT_EQ(outcome.text, "nccl fabric: expected NCCL 2.31.2 or newer, got 2.28.9");
  }
}

TEST(NcclFailure, MissingOnSomeRanksIsAnErrorOnAll) {
  for (const Outcome& outcome : Construct(1)) {
    EXPECT_EQ(outcome.code, ErrorCode::kMismatch);
    EXPECT_NE(outcome.text.find("1 of 3 ranks can't, first rank 0"), std::string::npos)
        << outcome.text;
  }
}

// What goes wrong on one rank is an error on all, also where it is no error of ours: the others
// wait for its word.
TEST(NcclFailure, AnyExceptionIsAnErrorOnAll) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  const auto outcomes = Outcomes(2, [&](Bootstrap& bootstrap) {
    nccl::NcclFabric fabric(bootstrap, Options(), [&]() -> nccl::Parts {
      if (bootstrap.rank() == 1) throw std::runtime_error("the driver is of another version");
      return FakeParts(world, bootstrap.rank())();
    });
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kMismatch);
    EXPECT_NE(outcome.text.find("first rank 1: the driver is of another version"),
              std::string::npos)
        << outcome.text;
  }
}

// Two nodes of two ranks, of which those from `first` on lack something.
std::vector<Outcome> Lacking(int first, const std::function<void(testing::FakeTraits&)>& lack) {
  const auto world = std::make_shared<FakeWorld>(4, 1, Order::kStreams);
  for (int rank = first; rank < 4; ++rank) lack(world->traits(rank));
  CommunicatorOptions options = Options();
  options.nodes = 2;
  return Outcomes(4, [&](Bootstrap& bootstrap) {
    nccl::NcclFabric fabric(bootstrap, options, FakeParts(world, bootstrap.rank()));
  });
}

void ExpectAll(const std::vector<Outcome>& outcomes, ErrorCode code, const std::string& text) {
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, code) << outcome.text;
    EXPECT_NE(outcome.text.find(text), std::string::npos) << outcome.text;
  }
}

TEST(NcclFailure, NoOneSidedOperations) {
  const auto lack = [](testing::FakeTraits& traits) { traits.one_sided = false; };
  const std::string text =
      "fake NCCL has no one-sided operations between nodes here; expected InfiniBand or RoCE";
  ExpectAll(Lacking(0, lack), ErrorCode::kUnsupported, "nccl fabric: " + text);
  ExpectAll(Lacking(3, lack), ErrorCode::kMismatch, "1 of 4 ranks can't, first rank 3: " + text);
}

TEST(NcclFailure, RanksThatAreNotOrderedByNode) {
  const auto lack = [](testing::FakeTraits& traits) { traits.lsa_teams = 3; };
  const std::string text =
      "fake NCCL finds 3 groups of ranks that reach each other's memory, expected the 2 nodes";
  ExpectAll(Lacking(0, lack), ErrorCode::kUnsupported, text);
  ExpectAll(Lacking(2, lack), ErrorCode::kMismatch, "2 of 4 ranks can't, first rank 2: " + text);
}

TEST(NcclFailure, NoNameForTheCommunicator) {
  const auto lack = [](testing::FakeTraits& traits) { traits.unique_id = false; };
  ExpectAll(Lacking(0, lack), ErrorCode::kInternal,
            "naming the communicator: rank 0: no network device");
}

TEST(NcclFailure, NoWindows) {
  const auto lack = [](testing::FakeTraits& traits) { traits.windows = false; };
  ExpectAll(Lacking(0, lack), ErrorCode::kUnsupported, "rank 0: no symmetric windows");
  ExpectAll(Lacking(2, lack), ErrorCode::kUnsupported,
            "registering segment 'counters': rank 2: no symmetric windows");
}

TEST(NcclFailure, NoPeerAccess) {
  const auto lack = [](testing::FakeTraits& traits) { traits.peer_pointers = false; };
  ExpectAll(Lacking(3, lack), ErrorCode::kUnsupported,
            "rank 3: segment 'counters': the memory of rank 2 can't be reached from rank 3 of the "
            "same node; expected peer access");
}

TEST(NcclFailure, OneHardwareQueueIsRefused) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  const auto outcomes = Construct(0);
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kUnsupported);
    EXPECT_NE(outcome.text.find("set it to 32"), std::string::npos) << outcome.text;
  }
}

TEST(NcclFailure, MoreHardwareQueuesAreFine) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const auto outcomes = Construct(0);
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
}

std::vector<Outcome> AddSegments(const std::function<int64_t(int rank)>& bytes) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  return Outcomes(2, [&](Bootstrap& bootstrap) {
    nccl::NcclFabric fabric(bootstrap, Options(), FakeParts(world, bootstrap.rank()));
    fabric.AddSegment(bytes(bootstrap.rank()), "landing", SegmentKind::kPerRank);
  });
}

TEST(NcclFailure, SegmentsAreEqualOnAllRanks) {
  for (const Outcome& outcome : AddSegments([](int rank) { return 1000 + rank; })) {
    EXPECT_EQ(outcome.code, ErrorCode::kMismatch);
    EXPECT_NE(outcome.text.find("rank 0 asks for 1000 bytes of 'landing', rank 1 for 1001"),
              std::string::npos)
        << outcome.text;
  }
}

TEST(NcclFailure, NoMemoryOnOneRankIsAnErrorOnAll) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  world->LimitMemory(/*rank=*/1, int64_t{4} << 20);  // counters, and one more segment
  const auto outcomes = Outcomes(2, [&](Bootstrap& bootstrap) {
    nccl::NcclFabric fabric(bootstrap, Options(), FakeParts(world, bootstrap.rank()));
    fabric.AddSegment(1000, "small", SegmentKind::kPerRank);
    fabric.AddSegment(1000, "landing", SegmentKind::kPerRank);
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kOutOfMemory);
    EXPECT_NE(outcome.text.find("adding segment 'landing': rank 1"), std::string::npos)
        << outcome.text;
  }
}

CommunicatorOptions ShortOptions(int nodes) {
  CommunicatorOptions options;
  options.nodes = nodes;
  options.timeout = std::chrono::seconds(1);
  return options;
}

// Of an all-gather that casts on two ranks, while rank 1 is refused the table that often.
struct Refused {
  std::vector<Outcome> outcomes;
  int freed = 0;
};
Refused GatherWithRefusals(int refusals) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  Refused result;
  result.outcomes = Outcomes(2, [&](Bootstrap& bootstrap) {
    const testing::ExpectAbandoned expect;
    CommunicatorOptions options = refusals > 1 ? ShortOptions(1) : Options();
    if (bootstrap.rank() == 1) options.free_cached_memory = [&] { ++result.freed; };
    Communicator comm(
        std::make_unique<nccl::NcclFabric>(bootstrap, options, FakeParts(world, bootstrap.rank()),
                                           [](const std::string&) {}),
        options);
    const int group = comm.RegisterGroup("layers.3", {{"w", 4, 4, DType::kBF16}});
    const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
    const std::vector<float> shard(8);
    if (bootstrap.rank() == 1) world->traits(1).refused_tables = refusals;
    comm.AllGather({group, {shard.data()}, {DType::kF32}, {landing.id, 0}});
  });
  world->Abandon();
  return result;
}

TEST(NcclFailure, ATableTakesTheRoomOfWhatTheCallerKeepsUnused) {
  const Refused once = GatherWithRefusals(1);
  for (const Outcome& outcome : once.outcomes) EXPECT_EQ(outcome.text, "");
  EXPECT_EQ(once.freed, 1);
  const Refused twice = GatherWithRefusals(2);
  EXPECT_EQ(twice.outcomes[1].code, ErrorCode::kOutOfMemory);
  EXPECT_EQ(twice.freed, 1);
}

constexpr const char* kAdvice =
    "did not come to its end within 1 s: look for the rank that stopped earlier";

// Here watchdogs only listen: they would end the process, which is what they are for.
class StalledPeer : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  CommunicatorOptions options() const { return ShortOptions(GetParam().first); }
  std::unique_ptr<nccl::NcclFabric> MakeFabric(const std::shared_ptr<FakeWorld>& world,
                                               Bootstrap& bootstrap) const {
    return std::make_unique<nccl::NcclFabric>(
        bootstrap, options(), FakeParts(world, bootstrap.rank()), [](const std::string&) {});
  }
};

// Nothing is freed or ended that a stream may still use: on a GPU that would wait for ever.
TEST_P(StalledPeer, EndsTheSetUp) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  world->Freeze(1);
  const auto outcomes = Outcomes(2, [&](Bootstrap& bootstrap) {
    const testing::ExpectAbandoned expect;
    MakeFabric(world, bootstrap);
  });
  ExpectAll(outcomes, ErrorCode::kTimeout, std::string("barrier ") + kAdvice);
  EXPECT_FALSE(world->ended_busy());
  world->Abandon();
}

TEST_P(StalledPeer, EndsABlockingCallAndPoisons) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  const auto outcomes = Outcomes(2, [&](Bootstrap& bootstrap) {
    const testing::ExpectAbandoned expect;
    Communicator comm(MakeFabric(world, bootstrap), options());
    const int group = comm.RegisterGroup("layers.3", {{"w", 4, 4, DType::kF32}});
    comm.Reserve({{group, {}, {}, DType::kF32}});
    const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
    const std::vector<float> shard(8);
    const AllGatherCall call{group, {shard.data()}, {DType::kF32}, {landing.id, 0}, {}};
    comm.AllGather(call);
    bootstrap.AllGather("");
    world->Freeze(1);
    try {
      comm.AllGather(call);
    } catch (const Error&) {
      EXPECT_TRUE(comm.poisoned());
      bootstrap.AllGather("");
      throw;
    }
  });
  ExpectAll(outcomes, ErrorCode::kTimeout,
            std::string("all_gather of group 'layers.3' ") + kAdvice);
  EXPECT_FALSE(world->ended_busy());
  world->Abandon();
}

TEST_P(StalledPeer, IsLeftBehindAtTheEnd) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  const auto outcomes = Outcomes(2, [&](Bootstrap& bootstrap) {
    const testing::ExpectAbandoned expect;
    const auto fabric = MakeFabric(world, bootstrap);
    bootstrap.AllGather("");
    world->Freeze(1);
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");  // says so on stderr
  EXPECT_FALSE(world->ended_busy());
  world->Abandon();
}

INSTANTIATE_TEST_SUITE_P(NcclFailure, StalledPeer,
                         ::testing::Values(std::pair(1, 2), std::pair(2, 1)),
                         testing::TopologyName);

TEST(NcclFailure, WatchdogNamesTheCounterThatDidNotMove) {
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  CommunicatorOptions options = Options();
  options.timeout = std::chrono::milliseconds(300);
  std::mutex mutex;
  std::string report;
  RunRanks(2, [&](Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    auto parts = FakeParts(world, rank);
    const auto device = parts().device;
    Communicator comm(std::make_unique<nccl::NcclFabric>(bootstrap, options, parts,
                                                         [&, rank](const std::string& text) {
                                                           const std::lock_guard lock(mutex);
                                                           if (rank == 0 && report.empty())
                                                             report = text;
                                                           world->Freeze(-1);
                                                         }),
                      options);
    const int group = comm.RegisterGroup("layers.3", {{"w", 4, 4, DType::kF32}});
    const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
    const std::vector<float> shard(8);
    comm.Barrier();
    bootstrap.AllGather("");
    world->Freeze(1);
    AllGatherCall call{group, {shard.data()}, {DType::kF32}, {landing.id, 0}};
    call.stream = device->CreateStream();
    comm.AllGather(call);
    const auto done = device->CreateEvent();
    device->Record(done, *call.stream);
    while (!device->Finished(done)) std::this_thread::yield();
    device->DestroyEvent(done);
  });
  EXPECT_NE(report.find("tide: rank 0: all_gather of group 'layers.3' (call "), std::string::npos)
      << report;
  EXPECT_NE(report.find("lane all_gather"), std::string::npos) << report;
  EXPECT_NE(report.find("stream 'main' waits for entry of rank 1 to reach 2, it is 1\n"),
            std::string::npos)
      << report;
}

// However many calls are under way, the last one is watched: nothing may come after it.
TEST(NcclFailure, WatchdogWatchesTheLastOfManyCalls) {
  constexpr int kCalls = 100;
  const auto world = std::make_shared<FakeWorld>(2, 1, Order::kStreams);
  CommunicatorOptions options = Options();
  options.timeout = std::chrono::milliseconds(300);
  std::mutex mutex;
  std::string report;
  const auto reported = [&] {
    const std::lock_guard lock(mutex);
    return !report.empty();
  };
  RunRanks(2, [&](Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    auto parts = FakeParts(world, rank);
    const auto device = parts().device;
    Communicator comm(std::make_unique<nccl::NcclFabric>(bootstrap, options, parts,
                                                         [&, rank](const std::string& text) {
                                                           const std::lock_guard lock(mutex);
                                                           if (rank == 0) report = text;
                                                         }),
                      options);
    const int group = comm.RegisterGroup("g", {{"w", 4, 4, DType::kF32}});
    const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
    const std::vector<float> shard(8);
    AllGatherCall call{group, {shard.data()}, {DType::kF32}, {landing.id, 0}};
    call.stream = device->CreateStream();
    for (int i = 1; i < kCalls; ++i) comm.AllGather(call);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    if (rank == 0) comm.AllGather(call);
    while (!reported() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    if (rank == 1) comm.AllGather(call);  // late, so that both come to their end
    const auto done = device->CreateEvent();
    device->Record(done, *call.stream);
    while (!device->Finished(done)) std::this_thread::yield();
    device->DestroyEvent(done);
  });
  EXPECT_NE(report.find("waits for entry of rank 1"), std::string::npos) << report;
}

}  // namespace
}  // namespace tide
