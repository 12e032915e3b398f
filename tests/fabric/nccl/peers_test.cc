// What ranks of one machine notice of each other on the nccl fabric: other calls, and the end of a
// process.
#include "fabric/nccl/peers.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
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
#include "fabric/nccl/watchdog.h"
#include "testing/count_allocations.h"
#include "testing/ranks.h"
#include "tide/communicator.h"

namespace tide {
namespace {

using testing::allocations;
using testing::FakeParts;
using testing::FakeWorld;
using testing::Order;
using testing::RunForkedRanks;
using testing::RunRanks;

// Far longer than a test takes: whatever ends a rank here is not a deadline.
constexpr std::chrono::minutes kDeadline{30};

Topology OneNode(const Bootstrap& bootstrap) { return {1, bootstrap.world()}; }

CallIdentity MakeCall(uint64_t sequence, uint64_t key) {
  CallIdentity identity;
  identity.sequence = sequence;
  identity.key = key;
  identity.group = static_cast<int32_t>(key);
  const std::string text = "call with key " + std::to_string(key);
  std::strncpy(identity.text, text.c_str(), kCallTextBytes - 1);
  return identity;
}

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

// Reports of ranks, in memory that forked ranks share.
struct Reports {
  char text[testing::kMostForkedRanks][4096];
};

class SharedReports {
 public:
  SharedReports()
      : reports_(new (mmap(nullptr, sizeof(Reports), PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Reports()) {}
  ~SharedReports() { munmap(reports_, sizeof(Reports)); }
  SharedReports(const SharedReports&) = delete;
  SharedReports& operator=(const SharedReports&) = delete;

  std::string of(int rank) const { return reports_->text[rank]; }
  void Keep(int rank, const std::string& report) {
    std::strncpy(reports_->text[rank], report.c_str(), sizeof reports_->text[rank] - 1);
  }

 private:
  Reports* reports_;
};

// A watchdog with one call of the rank's own that does not end by itself.
class WatchedRank {
 public:
  WatchedRank(Bootstrap& bootstrap, SharedReports& reports)
      : world_(std::make_shared<FakeWorld>(1, 1, Order::kStreams)),
        device_(FakeParts(world_, 0)().device),
        counters_(OneNode(bootstrap)),
        values_(static_cast<size_t>(counters_.bytes()) / sizeof(uint64_t)),
        peers_(bootstrap, OneNode(bootstrap), kDeadline) {
    const int rank = bootstrap.rank();
    nccl::WatchdogOptions options;
    options.timeout = kDeadline;
    options.read_counters = [this] {
      ++reads_;
      return values_;
    };
    options.expired = [rank, &reports](const std::string& report) {
      reports.Keep(rank, report);
      _exit(nccl::kWatchdogExitStatus);
    };
    lowered_.streams = {"main"};
    watchdog_ =
        std::make_unique<nccl::Watchdog>(rank, *device_, counters_, peers_, std::move(options));
  }

  // A call that waits for an entry of each of these ranks.
  void Enqueue(const std::vector<int>& producers) {
    Call call;
    call.identity = MakeCall(++sequence_, 1);
    peers_.Publish(call);
    nccl::WatchedCall* watched = watchdog_->Claim();
    watched->lane = Lane::kAllGather;
    watched->identity = call.identity;
    watched->lowered = &lowered_;
    for (const int producer : producers) {
      watched->waits.push_back({0, {CounterKind::kEntry, producer, 0}, 1, true});
    }
    const nccl::Stream stream = device_->CreateStream();
    const nccl::MemoryOp wait{true, &gate_, 1};
    device_->MemoryOps({&wait, 1}, stream);
    device_->Record(watched->done, stream);
    watchdog_->Arm(watched);
  }

  // Before calls are enqueued: the entry of this rank has come.
  void Satisfy(int producer) {
    const Counter entry{CounterKind::kEntry, producer, 0};
    values_[static_cast<size_t>(counters_.Offset(Lane::kAllGather, entry)) / sizeof(uint64_t)] = 1;
  }
  int reads() const { return reads_; }
  const nccl::Peers& peers() const { return peers_; }

 private:
  std::shared_ptr<FakeWorld> world_;
  std::unique_ptr<nccl::Device> device_;
  nccl::Counters counters_;
  std::vector<uint64_t> values_;
  std::atomic<int> reads_ = 0;
  uint64_t gate_ = 0;
  uint64_t sequence_ = 0;
  nccl::Lowered lowered_;
  nccl::Peers peers_;
  std::unique_ptr<nccl::Watchdog> watchdog_;
};

[[noreturn]] void WaitForTheEnd() {
  while (true) pause();
}

// Rank 2 waits for rank 0 alone, and hears why that one ended.
TEST(NcclDeath, AKilledRankEndsThoseThatWaitForIt) {
  SharedReports reports;
  const auto body = [&](Bootstrap& bootstrap) {
    WatchedRank rank(bootstrap, reports);
    rank.Enqueue(bootstrap.rank() == 0 ? std::vector{1} : std::vector{0});
    bootstrap.AllGather("");
    if (bootstrap.rank() == 1) kill(getpid(), SIGKILL);
    WaitForTheEnd();
  };
  constexpr int kStatus = nccl::kWatchdogExitStatus;
  RunForkedRanks(3, std::chrono::seconds(60), body, {kStatus, -SIGKILL, kStatus});
  const std::string direct = reports.of(0);
  EXPECT_EQ(direct.rfind("tide: rank 0: rank 1 has ended without a word", 0), 0U) << direct;
  EXPECT_NE(direct.find("call with key 1 (call 1, "), std::string::npos) << direct;
  EXPECT_NE(direct.find("waits for entry of rank 1 to reach 1, it is 0\n"), std::string::npos)
      << direct;
  EXPECT_NE(direct.find("  rank 1, which has ended, last enqueued call 1, call with key 1\n"),
            std::string::npos)
      << direct;
  EXPECT_NE(direct.find("  rank 2 last enqueued call 1"), std::string::npos) << direct;
  EXPECT_EQ(reports.of(2).rfind("tide: rank 2: rank 0 ended: rank 1 has ended without a word", 0),
            0U)
      << reports.of(2);
}

// A forked child keeps the rank's sockets open: the end of the process tells.
TEST(NcclDeath, AKilledRankWithAChildIsNoticed) {
  SharedReports reports;
  int until_the_end[2];  // the child lives until this process closes its end
  ASSERT_EQ(pipe(until_the_end), 0);
  const auto body = [&](Bootstrap& bootstrap) {
    close(until_the_end[1]);
    WatchedRank rank(bootstrap, reports);
    rank.Enqueue({1 - bootstrap.rank()});
    bootstrap.AllGather("");
    if (bootstrap.rank() == 1) {
      char none;
      if (fork() == 0) _exit(static_cast<int>(read(until_the_end[0], &none, 1)));
      kill(getpid(), SIGKILL);
    }
    WaitForTheEnd();
  };
  RunForkedRanks(2, std::chrono::seconds(60), body, {nccl::kWatchdogExitStatus, -SIGKILL});
  close(until_the_end[1]);
  close(until_the_end[0]);
}

// A rank whose part is done may end as it likes, however long the call goes on.
TEST(NcclDeath, ARankThatNobodyWaitsForMayEnd) {
  SharedReports reports;
  const auto body = [&](Bootstrap& bootstrap) {
    WatchedRank rank(bootstrap, reports);
    rank.Satisfy(1);
    rank.Enqueue({0, 1});
    bootstrap.AllGather("");
    if (bootstrap.rank() == 1) _exit(0);
    while (!rank.peers().Gone(1)) std::this_thread::yield();
    // A report would come with the second look.
    const int before = rank.reads();
    while (rank.reads() < before + 10) std::this_thread::yield();
    _exit(0);
  };
  RunForkedRanks(2, std::chrono::seconds(60), body);
  EXPECT_EQ(reports.of(0), "");
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
