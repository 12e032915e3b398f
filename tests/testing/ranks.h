// Ranks as threads: one test body over W ranks of one process.
#ifndef TIDE_TESTS_TESTING_RANKS_H_
#define TIDE_TESTS_TESTING_RANKS_H_

#include <barrier>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tide/bootstrap.h"
#include "tide/communicator.h"

namespace tide::testing {

// A meeting place of W threads.
class Hub {
 public:
  explicit Hub(int world) : barrier_(world), box_(static_cast<size_t>(world)) {}
  std::vector<std::string> AllGather(int rank, const std::string& mine) {
    box_[static_cast<size_t>(rank)] = mine;
    barrier_.arrive_and_wait();
    std::vector<std::string> all = box_;
    barrier_.arrive_and_wait();
    return all;
  }

 private:
  std::barrier<> barrier_;
  std::vector<std::string> box_;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(Hub& hub, int rank, int world) : hub_(hub), rank_(rank), world_(world) {}
  int rank() const override { return rank_; }
  int world() const override { return world_; }
  std::vector<std::string> AllGather(const std::string& mine) override {
    return hub_.AllGather(rank_, mine);
  }

 private:
  Hub& hub_;
  int rank_;
  int world_;
};

// Runs body(bootstrap) on W threads and rethrows the first exception after all have ended.
inline void RunRanks(int world, const std::function<void(Bootstrap&)>& body) {
  Hub hub(world);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadBootstrap bootstrap(hub, rank, world);
      try {
        body(bootstrap);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// The same with a communicator each.
inline void RunCommunicators(int world, const CommunicatorOptions& options,
                             const std::function<void(Communicator&)>& body) {
  RunRanks(world, [&](Bootstrap& bootstrap) {
    Communicator communicator(bootstrap, options);
    body(communicator);
  });
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_RANKS_H_
