// What goes wrong on the nccl fabric, and what it says.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fabric/nccl/fake.h"
#include "fabric/nccl/nccl_fabric.h"
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
  FakeWorld world(3, 1, Order::kStreams);
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

TEST(NcclFailure, OneHardwareQueueIsRefused) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  const auto outcomes = Construct(0);
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kUnsupported);
    EXPECT_NE(outcome.text.find("set it to 32"), std::string::npos) << outcome.text;
  }
}

std::vector<Outcome> AddSegments(const std::function<int64_t(int rank)>& bytes) {
  FakeWorld world(2, 1, Order::kStreams);
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
  FakeWorld world(2, 1, Order::kStreams);
  world.LimitMemory(/*rank=*/1, int64_t{4} << 20);  // counters, and one more segment
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

TEST(NcclFailure, WatchdogNamesTheCounterThatDidNotMove) {
  FakeWorld world(2, 1, Order::kStreams);
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
                                                           world.Freeze(-1);
                                                         }),
                      options);
    const int group = comm.RegisterGroup("layers.3", {{"w", 4, 4, DType::kF32}});
    const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
    const std::vector<float> shard(8);
    comm.Barrier();
    bootstrap.AllGather("");
    world.Freeze(1);
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

}  // namespace
}  // namespace tide
