// Memory of segments that the caller gives.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

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

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kRanks = 2;

// Whole allocations, and how many of them live.
struct Caller {
  std::shared_ptr<void> Allocate(int64_t bytes) {
    asked = bytes;
    ++live;
    return {std::aligned_alloc(4096, static_cast<size_t>(bytes)), [this](void* address) {
              --live;
              std::free(address);
            }};
  }
  int64_t asked = 0;
  std::atomic<int> live = 0;
};

std::unique_ptr<nccl::NcclFabric> MakeFabric(
    const std::shared_ptr<FakeWorld>& world, Bootstrap& bootstrap,
    std::function<std::shared_ptr<void>(int64_t)> allocate) {
  CommunicatorOptions options;
  options.allocate_segment = std::move(allocate);
  return std::make_unique<nccl::NcclFabric>(bootstrap, options, FakeParts(world, bootstrap.rank()));
}

TEST(NcclSegments, TheCallersMemoryIsAskedForWholeAndFreedWithTheLastView) {
  const auto world = std::make_shared<FakeWorld>(kRanks, 1, Order::kStreams);
  RunRanks(kRanks, [&](Bootstrap& bootstrap) {
    Caller caller;
    world->LimitMemory(bootstrap.rank(), 0);  // NCCL is not asked
    auto fabric =
        MakeFabric(world, bootstrap, [&](int64_t bytes) { return caller.Allocate(bytes); });
    EXPECT_EQ(caller.asked, 2 * kMiB);
    EXPECT_EQ(caller.live, 1);
    SegmentView view = fabric->AddSegment(5 * kMiB, "landing", SegmentKind::kPerRank);
    EXPECT_EQ(caller.asked, 6 * kMiB);
    EXPECT_EQ(view.bytes, 5 * kMiB);
    EXPECT_EQ(view.address, view.owner.get());
    fabric.reset();
    EXPECT_EQ(caller.live, 1);
    view = {};
    EXPECT_EQ(caller.live, 0);
  });
}

TEST(NcclSegments, WhatTheCallerLeavesIsNccls) {
  const auto world = std::make_shared<FakeWorld>(kRanks, 1, Order::kStreams);
  RunRanks(kRanks, [&](Bootstrap& bootstrap) {
    Caller caller;
    world->LimitMemory(bootstrap.rank(), 2 * kMiB);  // the counters
    const auto fabric = MakeFabric(world, bootstrap, [&](int64_t bytes) {
      return bytes < 4 * kMiB ? nullptr : caller.Allocate(bytes);
    });
    EXPECT_EQ(caller.live, 0);
    const SegmentView view = fabric->AddSegment(4 * kMiB, "landing", SegmentKind::kPerRank);
    EXPECT_EQ(caller.live, 1);
  });
}

TEST(NcclSegments, AreLimitedInSum) {
  const auto world = std::make_shared<FakeWorld>(kRanks, 1, Order::kStreams);
  RunRanks(kRanks, [&](Bootstrap& bootstrap) {
    CommunicatorOptions options;
    options.memory_limit_bytes = 8 * kMiB;
    // A rank that holds more than the others, for another communicator, refuses for all.
    options.reserved_bytes = std::make_shared<ReservedBytes>(bootstrap.rank() == 1 ? 2 * kMiB : 0);
    auto fabric =
        std::make_unique<nccl::NcclFabric>(bootstrap, options, FakeParts(world, bootstrap.rank()));
    SegmentView view = fabric->AddSegment(3 * kMiB, "landing", SegmentKind::kPerRank);
    try {
      fabric->AddSegment(kMiB, "stage", SegmentKind::kPerRank);
      ADD_FAILURE() << "8 MiB of 8 were reserved on rank 1";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_NE(std::string(error.what())
                    .find("rank 1: 'stage' needs 2 MiB, but only 0 B is available "
                          "(memory_limit_bytes, TIDE_MEMORY_LIMIT: 8 MiB, of which 8 MiB is "
                          "reserved)"),
                std::string::npos)
          << error.what();
    }
    fabric.reset();
    view = {};
    EXPECT_EQ(options.reserved_bytes->load(), bootstrap.rank() == 1 ? 2 * kMiB : 0);
  });
}

TEST(NcclSegments, MemoryThatDoesNotFitOnOneRankIsAnErrorOnAll) {
  const auto world = std::make_shared<FakeWorld>(kRanks, 1, Order::kStreams);
  RunRanks(kRanks, [&](Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    const auto fabric =
        MakeFabric(world, bootstrap, [rank](int64_t bytes) -> std::shared_ptr<void> {
          if (rank == 0 || bytes < 4 * kMiB) return nullptr;
          throw Error(ErrorCode::kOutOfMemory, "torch has no 4 MiB");
        });
    try {
      fabric->AddSegment(4 * kMiB, "landing", SegmentKind::kPerRank);
      ADD_FAILURE() << "rank 1 had no memory";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_NE(std::string(error.what()).find("rank 1: torch has no 4 MiB"), std::string::npos)
          << error.what();
    }
    // What rank 0 got is given back, and both go on.
    fabric->AddSegment(kMiB, "landing", SegmentKind::kPerRank);
  });
}

}  // namespace
}  // namespace tide
