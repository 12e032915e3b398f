// Ranks whose hosts only enqueue, driven by one thread: which host goes on, and which stream, is
// drawn from a seed, so that a run can be repeated. Nothing here waits: when nothing can move, that
// is the result.
//
//   const Meeting meet([&] { ended = Drive(world, hosts, seed); });
//   RunRanks(ranks, [&](Bootstrap& bootstrap) { /* set hosts[rank] */ meet(bootstrap); });
#ifndef TIDE_TESTS_FABRIC_NCCL_DRIVE_H_
#define TIDE_TESTS_FABRIC_NCCL_DRIVE_H_

#include <functional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "fabric/nccl/fake.h"
#include "testing/ranks.h"

namespace tide::testing {

// What a rank's host does, in pieces that enqueue and return; false: it was at its end already.
using Host = std::function<bool()>;

// Takes turns between hosts and streams until nothing moves. A late rank's host, and what follows a
// pause in a stream, goes on when nothing else can. Returns whether all came to their end.
inline bool Drive(FakeWorld& world, const std::vector<Host>& hosts, unsigned seed,
                  const std::set<int>& late = {}) {
  world.Drive(seed);
  std::mt19937 random(seed);
  // Hosts far ahead of their streams, as most often, or close by.
  const unsigned host_chance = 1U << random() % 8;
  std::vector<int> punctual;
  std::vector<int> tardy;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    (late.count(rank) > 0 ? tardy : punctual).push_back(rank);
  }
  const auto enqueue = [&](std::vector<int>& ranks) {
    while (!ranks.empty()) {
      const size_t i = random() % ranks.size();
      if (hosts[static_cast<size_t>(ranks[i])]()) return true;
      ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return false;
  };
  for (;;) {
    if (random() % host_chance == 0 && enqueue(punctual)) continue;
    if (world.Step() || enqueue(punctual)) continue;
    const bool host_first = random() % 2 == 0;
    if (host_first && enqueue(tardy)) continue;
    if (world.Resume() || enqueue(tardy)) continue;
    return world.Idle();
  }
}

// Runs body(bootstrap) on a thread for each rank, as RunRanks does; it calls `meet`, when its host
// is ready, and goes on when `drive` has returned, which runs once, on one thread.
class Meeting {
 public:
  explicit Meeting(std::function<void()> drive) : drive_(std::move(drive)) {}
  void operator()(Bootstrap& bootstrap) const {
    bootstrap.AllGather("");
    if (bootstrap.rank() == 0) drive_();
    bootstrap.AllGather("");
  }

 private:
  const std::function<void()> drive_;
};

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_DRIVE_H_
