// What a rank on the nccl fabric notices of the end of another one's process.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/nccl/fake.h"
#include "fabric/nccl/forked_ranks.h"
#include "fabric/nccl/nccl_fabric.h"
#include "fabric/nccl/peers.h"
#include "fabric/nccl/watchdog.h"
#include "fabric/nccl/watched_peers.h"

namespace tide {
namespace {

using testing::FakeParts;
using testing::FakeWorld;
using testing::kDeadline;
using testing::MakeCall;
using testing::OneNode;
using testing::Order;
using testing::RunForkedRanks;

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

}  // namespace
}  // namespace tide
