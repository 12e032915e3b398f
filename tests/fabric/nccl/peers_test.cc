// What ranks of one machine notice of each other's calls on the nccl fabric.
#include "fabric/nccl/peers.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/nccl/fake.h"
#include "fabric/nccl/forked_ranks.h"
#include "fabric/nccl/nccl_fabric.h"
#include "fabric/nccl/watched_peers.h"
#include "testing/count_allocations.h"
#include "testing/ranks.h"
#include "tide/communicator.h"

namespace tide {
namespace {

using testing::allocations;
using testing::FakeParts;
using testing::FakeWorld;
using testing::kDeadline;
using testing::MakeCall;
using testing::OneNode;
using testing::Order;
using testing::RunForkedRanks;
using testing::RunRanks;

// Publishes calls up to number `last`; the key of number `other` is 2, that of all others 1.
void PublishUpTo(nccl::Peers& peers, uint64_t* published, uint64_t last, uint64_t other) {
  Call call;
  while (*published < last) {
    ++*published;
    call.identity = MakeCall(*published, *published == other ? 2 : 1);
    peers.Publish(call);
  }
}

TEST(NcclCalls, TheFirstDifferenceIsNamedOnce) {
  RunRanks(3, [&](Bootstrap& bootstrap) {
    nccl::Peers peers(bootstrap, OneNode(bootstrap), kDeadline);
    EXPECT_EQ(peers.unwatched_reason(), "");
    uint64_t published = 0;
    PublishUpTo(peers, &published, 6, /*other=*/0);
    bootstrap.AllGather("");
    EXPECT_EQ(peers.FindMismatch(), std::nullopt);
    bootstrap.AllGather("");
    PublishUpTo(peers, &published, 20, /*other=*/bootstrap.rank() == 1 ? 9 : 0);
    bootstrap.AllGather("");
    const auto mismatch = peers.FindMismatch();
    ASSERT_TRUE(mismatch);
    EXPECT_EQ(*mismatch, bootstrap.rank() == 2
                             ? "call 9: rank 1 entered call with key 2, rank 2 entered call with "
                               "key 1; expected the same calls in the same order on every rank"
                             : "call 9: rank 0 entered call with key 1, rank 1 entered call with "
                               "key 2; expected the same calls in the same order on every rank");
    EXPECT_EQ(peers.FindMismatch(), std::nullopt);
    bootstrap.AllGather("");
  });
}

// A host that is far ahead of another's is compared when the other comes near.
TEST(NcclCalls, RanksThatAreFarApartAreComparedLater) {
  RunRanks(2, [&](Bootstrap& bootstrap) {
    const bool ahead = bootstrap.rank() == 0;
    nccl::Peers peers(bootstrap, OneNode(bootstrap), kDeadline);
    uint64_t published = 0;
    PublishUpTo(peers, &published, ahead ? nccl::kComparedCalls + 100 : 10,
                /*other=*/ahead ? 5 : 0);
    bootstrap.AllGather("");
    EXPECT_EQ(peers.FindMismatch(), std::nullopt);
    bootstrap.AllGather("");
    PublishUpTo(peers, &published, 200, /*other=*/0);
    bootstrap.AllGather("");
    const auto mismatch = peers.FindMismatch();
    ASSERT_TRUE(mismatch);
    EXPECT_EQ(
        mismatch->rfind("some call after 0 differed first, no longer known; call 101: rank 0", 0),
        0U)
        << *mismatch;
    bootstrap.AllGather("");
  });
}

TEST(NcclCalls, PublishingTakesNoMemory) {
  RunRanks(2, [&](Bootstrap& bootstrap) {
    int64_t before = allocations;
    nccl::Peers peers(bootstrap, OneNode(bootstrap), kDeadline);
    EXPECT_GT(allocations, before) << "is anything counted?";
    Call call;
    before = allocations;
    for (uint64_t sequence = 1; sequence < 3 * nccl::kComparedCalls; ++sequence) {
      call.identity.sequence = sequence;
      call.identity.key = sequence;
      peers.Publish(call);
    }
    EXPECT_EQ(allocations, before);
    EXPECT_EQ(peers.LastCall(bootstrap.rank()), 3 * nccl::kComparedCalls - 1);
    bootstrap.AllGather("");
  });
}

// Names of sockets as ranks of other machines would give them: nobody listens there.
class TwoMachines final : public Bootstrap {
 public:
  explicit TwoMachines(Bootstrap& all) : all_(all) {}
  int rank() const override { return all_.rank(); }
  int world() const override { return all_.world(); }
  std::vector<std::string> AllGather(const std::string& mine) override {
    std::vector<std::string> words = all_.AllGather(mine);
    for (int rank = 0; rank < world(); ++rank) {
      const bool here = rank / 2 == this->rank() / 2;
      std::string& word = words[static_cast<size_t>(rank)];
      if (!here && word.rfind("tide-", 0) == 0) word += "-elsewhere";
    }
    return words;
  }

 private:
  Bootstrap& all_;
};

TEST(NcclCalls, RanksOfOtherMachinesAreNotLookedAfter) {
  RunRanks(4, [&](Bootstrap& all) {
    TwoMachines bootstrap(all);
    nccl::Peers peers(bootstrap, {2, 2}, kDeadline);
    EXPECT_NE(peers.unwatched_reason().find("2 of 4 ranks are on other machines"),
              std::string::npos)
        << peers.unwatched_reason();
    uint64_t published = 0;
    PublishUpTo(peers, &published, 5, /*other=*/all.rank() >= 2 ? 3 : 0);
    all.AllGather("");
    EXPECT_EQ(peers.FindMismatch(), std::nullopt);
    all.AllGather("");
    PublishUpTo(peers, &published, 8, /*other=*/all.rank() == 3 ? 7 : 0);
    all.AllGather("");
    EXPECT_EQ(peers.FindMismatch().has_value(), all.rank() >= 2);
    all.AllGather("");
  });
}

// A rank that can't have a page is no error, and its end is no news.
TEST(NcclCalls, ARankWithoutMemoryIsNotLookedAfter) {
  RunForkedRanks(2, std::chrono::seconds(60), [](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{4096, 4096};  // of a file, which shared memory is
      ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    }
    nccl::Peers peers(bootstrap, OneNode(bootstrap), kDeadline);
    EXPECT_EQ(peers.unwatched_reason().rfind("rank 1: call page: ", 0), 0U)
        << peers.unwatched_reason();
    uint64_t published = 0;
    PublishUpTo(peers, &published, 3, /*other=*/static_cast<uint64_t>(bootstrap.rank()));
    bootstrap.AllGather("");
    EXPECT_EQ(peers.FindMismatch(), std::nullopt);
    EXPECT_FALSE(peers.Gone(1 - bootstrap.rank()));
    EXPECT_NE(peers.DescribePositions().find("not known: rank 1: call page"), std::string::npos);
  });
}

// All over the fake: what a whole communicator does.
class WholeFabric : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  int ranks() const { return GetParam().first * GetParam().second; }
  // Enqueues, waits until every rank has reported, and lets everything end.
  std::vector<std::string> Reports(
      const std::function<void(Communicator&, int rank, void* stream)>& enqueue);
};

std::vector<std::string> WholeFabric::Reports(
    const std::function<void(Communicator&, int rank, void* stream)>& enqueue) {
  const auto world = std::make_shared<FakeWorld>(ranks(), 1, Order::kStreams);
  CommunicatorOptions options;
  options.nodes = GetParam().first;
  options.timeout = kDeadline;
  std::mutex mutex;
  std::vector<std::string> reports(static_cast<size_t>(ranks()));
  RunRanks(ranks(), [&](Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    std::string& report = reports[static_cast<size_t>(rank)];
    auto parts = FakeParts(world, rank);
    const auto device = parts().device;
    Communicator comm(std::make_unique<nccl::NcclFabric>(bootstrap, options, parts,
                                                         [&](const std::string& text) {
                                                           const std::lock_guard lock(mutex);
                                                           if (report.empty()) report = text;
                                                         }),
                      options);
    EXPECT_EQ(comm.unwatched_reason(), "");
    enqueue(comm, rank, device->CreateStream());
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    bool reported = false;
    while (!reported && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
      const std::lock_guard lock(mutex);
      reported = !report.empty();
    }
    bootstrap.AllGather("");
    if (rank == 0) world->Abandon();
    bootstrap.AllGather("");
  });
  return reports;
}

TEST_P(WholeFabric, AnotherCallIsReportedByAll) {
  const auto reports = Reports([](Communicator& comm, int rank, void* stream) {
    static const float kShard[8] = {};  // streams read it later
    std::vector<AllGatherCall> calls;
    for (const char* name : {"layers.3", "layers.4"}) {
      const int group = comm.RegisterGroup(name, {{"w", 4, 4, DType::kF32}});
      comm.Reserve({{group, {}, {}, DType::kF32}});
      const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), name);
      calls.push_back({group, {kShard}, {DType::kF32}, {landing.id, 0}, stream});
    }
    comm.AllGather(calls[0]);
    if (rank == 1) std::swap(calls[0], calls[1]);
    for (const AllGatherCall& call : calls) comm.AllGather(call);
  });
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const std::string& report = reports[rank];
    EXPECT_EQ(report.rfind("tide: rank " + std::to_string(rank) + ": call 2: rank ", 0), 0U)
        << report;
    EXPECT_NE(report.find("rank 1 entered all_gather of group 'layers.4'"), std::string::npos)
        << report;
    EXPECT_NE(report.find("entered all_gather of group 'layers.3'"), std::string::npos) << report;
    EXPECT_NE(report.find("expected the same calls in the same order"), std::string::npos)
        << report;
    EXPECT_NE(report.find("  this rank last enqueued call "), std::string::npos) << report;
  }
}

TEST_P(WholeFabric, AMissingGradientIsNamed) {
  const auto reports = Reports([](Communicator& comm, int rank, void* stream) {
    const int group = comm.RegisterGroup(
        "layers.3", {{"weight", 4, 4, DType::kF32}, {"bias", 4, 1, DType::kF32}});
    comm.Reserve({{group, {0, 1}, {DType::kF32, DType::kF32}, DType::kF32}});
    static const float kGradient[16] = {};
    static thread_local float output[16];
    ReduceScatterCall call;
    call.group = group;
    call.params = {0, 1};
    if (rank == 1) call.params = {0};
    call.gradients.assign(call.params.size(), kGradient);
    call.grad_dtypes.assign(call.params.size(), DType::kF32);
    call.output = output;
    call.stream = stream;
    comm.ReduceScatter(call);
  });
  for (const std::string& report : reports) {
    EXPECT_NE(report.find("has a gradient of 'bias'"), std::string::npos) << report;
    EXPECT_NE(report.find("set_reduce_scatter_unused_params(True)"), std::string::npos) << report;
  }
}

INSTANTIATE_TEST_SUITE_P(NcclCalls, WholeFabric,
                         ::testing::Values(std::pair(1, 2), std::pair(1, 3), std::pair(3, 1)),
                         [](const auto& topology) {
                           return std::to_string(topology.param.first) + "x" +
                                  std::to_string(topology.param.second);
                         });

}  // namespace
}  // namespace tide
