// Streams that share no hardware queue with compute, on a fake with so many queues.
#include "fabric/nccl/stream_search.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "fabric/nccl/fake.h"
#include "fabric/nccl/nccl_fabric.h"
#include "testing/ranks.h"

namespace tide {
namespace {

using nccl::FoundStreams;
using nccl::Stream;
using testing::FakeParts;
using testing::FakeWorld;
using testing::Order;

// One rank. A stream's handle is that of its hardware queue.
class Gpu {
 public:
  Gpu(size_t queues, unsigned seed)
      : world_(std::make_shared<FakeWorld>(1, seed, Order::kStreams)),
        device_(FakeParts(world_, 0)().device) {
    world_->LimitQueues(queues);
  }
  std::vector<Stream> Make(int count) {
    std::vector<Stream> streams;
    for (int i = 0; i < count; ++i) streams.push_back(device_->CreateStream());
    return streams;
  }
  // `after_wait` is called with the number of waits for events so far.
  FoundStreams Find(
      const std::vector<Stream>& compute, int count,
      const std::function<void(int)>& after_wait = [](int) {}) {
    int waits = 0;
    return nccl::FindStreams(*device_, compute, count, [&](nccl::EventHandle event) {
      while (!device_->Finished(event)) std::this_thread::yield();
      after_wait(++waits);
    });
  }
  void End(Stream stream) { device_->DestroyStream(stream); }
  FakeWorld& world() { return *world_; }
  static int Live(Stream stream) { return static_cast<FakeWorld::Queue*>(stream)->streams; }

 private:
  const std::shared_ptr<FakeWorld> world_;
  const std::unique_ptr<nccl::Device> device_;
};

std::set<Stream> Distinct(const std::vector<Stream>& streams) {
  return {streams.begin(), streams.end()};
}

constexpr int kSeeds = 20;
constexpr size_t kEnough = 1000;

// However slowly a queue comes to its turn.
TEST(NcclStreamSearch, WhereQueuesAbound_TheFirstStreamsAreTaken) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    Gpu gpu(kEnough, seed);
    const std::vector<Stream> compute = gpu.Make(3);
    const FoundStreams found = gpu.Find(compute, 8);
    EXPECT_EQ(found.aliases, 0) << "seed " << seed;
    EXPECT_EQ(Distinct(found.streams).size(), 8U) << "seed " << seed;
    EXPECT_EQ(gpu.world().calls(0).streams, 3 + 8) << "seed " << seed;
    EXPECT_TRUE(gpu.world().Idle()) << "seed " << seed;
  }
}

// Torch made many streams before: the next ones would all go to compute's queue, if those that
// were found to be there did not stay until the search ends.
TEST(NcclStreamSearch, StreamsInTheQueuesOfComputeAreReplaced) {
  Gpu gpu(4, 1);
  const std::vector<Stream> torch = gpu.Make(8);
  const std::vector<Stream> compute = {torch[0], torch[1]};
  const FoundStreams found = gpu.Find(compute, 2);
  EXPECT_EQ(found.aliases, 0);
  EXPECT_EQ(Distinct(found.streams), (std::set<Stream>{torch[2], torch[3]}));
  // What was tried in vain is gone.
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Gpu::Live(torch[static_cast<size_t>(i)]), i < 2 ? 2 : 3);
  EXPECT_TRUE(gpu.world().Idle());
}

// Two queues are almost empty, compute's and another, where new streams go for a while.
TEST(NcclStreamSearch, StreamsThatShareAQueueWithEachOtherAreReplaced) {
  Gpu gpu(4, 1);
  const std::vector<Stream> torch = gpu.Make(4 * 6);
  for (size_t i = 4; i < torch.size(); ++i) {
    if (i % 4 < 2) gpu.End(torch[i]);
  }
  const FoundStreams found = gpu.Find({torch[0]}, 3);
  EXPECT_EQ(found.aliases, 0);
  EXPECT_EQ(Distinct(found.streams), (std::set<Stream>{torch[1], torch[2], torch[3]}));
}

TEST(NcclStreamSearch, WhereQueuesAreFewTheSearchedOnesShareThem) {
  Gpu gpu(3, 1);
  const std::vector<Stream> compute = gpu.Make(1);
  const FoundStreams found = gpu.Find(compute, 6);
  EXPECT_EQ(found.aliases, 0);
  EXPECT_EQ(found.streams.size(), 6U);
  EXPECT_EQ(Distinct(found.streams).size(), 2U);
  EXPECT_EQ(Distinct(found.streams).count(compute[0]), 0U);
}

TEST(NcclStreamSearch, OneQueueIsAllAliases) {
  Gpu gpu(1, 1);
  const FoundStreams found = gpu.Find(gpu.Make(1), 3);
  EXPECT_EQ(found.aliases, 3);
  EXPECT_EQ(found.streams.size(), 3U);
  EXPECT_EQ(Gpu::Live(found.streams[0]), 4);
  EXPECT_TRUE(gpu.world().Idle()) << "a wait was left behind";
}

// Work of the caller's that takes its time is awaited, not taken for an alias.
TEST(NcclStreamSearch, BusyComputeIsNoAlias) {
  Gpu gpu(kEnough, 1);
  const std::vector<Stream> compute = gpu.Make(1);
  bool ran = false;
  PauseStream(gpu.world(), compute[0]);
  RunInStream(gpu.world(), compute[0], [&] { ran = true; });
  const FoundStreams found = gpu.Find(compute, 2);
  EXPECT_TRUE(ran);
  EXPECT_EQ(found.aliases, 0);
  EXPECT_EQ(Distinct(found.streams).size(), 2U);
}

// Something else of the caller's holds up its stream, just when the first stream is tried out.
TEST(NcclStreamSearch, WhatHappensOnceIsNoAlias) {
  Gpu gpu(kEnough, 1);
  const std::vector<Stream> compute = gpu.Make(1);
  auto* queue = static_cast<FakeWorld::Queue*>(compute[0]);
  bool delayed = false;
  const FoundStreams found = gpu.Find(compute, 1, [&](int waits) {
    if (waits != 2) return;  // before: what compute held, and the kernel without a wait
    gpu.world().Append(
        queue, {[looks = 0]() mutable { return ++looks > 1000; }, {}, [&] { delayed = true; }});
  });
  EXPECT_TRUE(delayed);
  EXPECT_EQ(found.aliases, 0);
  EXPECT_EQ(gpu.world().calls(0).streams, 1 + 1) << "it was discarded";
}

// All ranks look at once; calls run on what they found.
class FabricsOf : public ::testing::TestWithParam<int> {};

TEST_P(FabricsOf, StreamsAreChosenWhenTheyAreMade) {
  constexpr int kRanks = 4;
  const int nodes = GetParam();
  for (const size_t queues : {size_t{1}, kEnough}) {
    const auto world = std::make_shared<FakeWorld>(kRanks, 1, Order::kStreams);
    world->LimitQueues(queues);
    testing::RunRanks(kRanks, [&](Bootstrap& bootstrap) {
      const auto parts = FakeParts(world, bootstrap.rank());
      const auto device = parts().device;
      CommunicatorOptions options;
      options.nodes = nodes;
      options.compute_streams = {device->CreateStream()};
      Communicator comm(std::make_unique<nccl::NcclFabric>(bootstrap, options, parts), options);
      EXPECT_EQ(comm.aliased_streams() > 0, queues == 1);
      comm.Barrier();
    });
    EXPECT_FALSE(world->ended_busy());
  }
}

INSTANTIATE_TEST_SUITE_P(NcclStreamSearch, FabricsOf, ::testing::Values(1, 2));

}  // namespace
}  // namespace tide
