// Ranks as processes that are forked before anything of CUDA is touched: NCCL wants a process each,
// and a CUDA context does not survive a fork.
#ifndef TIDE_TESTS_FABRIC_NCCL_FORKED_RANKS_H_
#define TIDE_TESTS_FABRIC_NCCL_FORKED_RANKS_H_

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "tide/bootstrap.h"

namespace tide::testing {

inline constexpr int kMostForkedRanks = 8;
inline constexpr size_t kBoxBytes = 4096;

// A meeting place in memory that parent and children share.
struct ForkedHub {
  struct Box {
    size_t bytes;
    char text[kBoxBytes];
  };
  std::atomic<int> arrived;  // ever
  Box boxes[kMostForkedRanks];
};

class ForkedBootstrap final : public Bootstrap {
 public:
  ForkedBootstrap(ForkedHub& hub, int rank, int world) : hub_(hub), rank_(rank), world_(world) {}
  int rank() const override { return rank_; }
  int world() const override { return world_; }
  std::vector<std::string> AllGather(const std::string& mine) override {
    ForkedHub::Box& box = hub_.boxes[rank_];
    if (mine.size() > kBoxBytes) throw std::length_error("a box is too small");
    box.bytes = mine.size();
    std::memcpy(box.text, mine.data(), mine.size());
    Meet();
    std::vector<std::string> all;
    for (int rank = 0; rank < world_; ++rank) {
      all.emplace_back(hub_.boxes[rank].text, hub_.boxes[rank].bytes);
    }
    Meet();
    return all;
  }

 private:
  void Meet() {
    const int target = ++meetings_ * world_;
    ++hub_.arrived;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (hub_.arrived.load() < target) {
      if (std::chrono::steady_clock::now() > deadline)
        throw std::runtime_error("a rank is missing");
      sched_yield();
    }
  }

  ForkedHub& hub_;
  int rank_;
  int world_;
  int meetings_ = 0;
};

// Runs body(bootstrap) in W processes. A rank that fails, throws, does not end in time, or ends
// with another status than `statuses` has for it (0 without; a signal is negative), fails the test.
inline void RunForkedRanks(int world, std::chrono::seconds limit,
                           const std::function<void(Bootstrap&)>& body,
                           std::vector<int> statuses = {}) {
  statuses.resize(static_cast<size_t>(world));
  void* shared =
      mmap(nullptr, sizeof(ForkedHub), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* hub = new (shared) ForkedHub();
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    ForkedBootstrap bootstrap(*hub, rank, world);
    try {
      body(bootstrap);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
    std::fflush(stdout);
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = children[static_cast<size_t>(rank)];
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "rank " << rank << " does not end";
        kill(child, SIGKILL);
      }
      usleep(1000);
    }
    const int ended = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    EXPECT_EQ(ended, statuses[static_cast<size_t>(rank)]) << "rank " << rank;
  }
  munmap(shared, sizeof(ForkedHub));
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_FORKED_RANKS_H_
