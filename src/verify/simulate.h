// Runs the steps of a model in one possible order.
//
// Counters only grow and nothing depends on data, so which steps can run at all does not depend on
// the order chosen: one order answers whether any step stays blocked.
#ifndef TIDE_VERIFY_SIMULATE_H_
#define TIDE_VERIFY_SIMULATE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "verify/model.h"

namespace tide::verify {

// What is done to one wait or await to see whether it is needed.
struct Relaxed {
  const Step* step = nullptr;
  bool weakened = false;  // one increment less; else it is no wait at all
};

class Simulation {
 public:
  // tracks: lists of steps, each run in order. Without pacing, operations so tagged are skipped.
  Simulation(const Model& model, std::vector<std::vector<int>> tracks, bool pacing,
             Relaxed relaxed = {});

  // Calls `execute` for each step when it runs, and `check_interrupt` now and then. Returns the
  // steps at which tracks stay blocked.
  std::vector<int> Run(const std::function<void(const Step&)>& execute,
                       const std::function<void()>& check_interrupt);

  int64_t counter(int index) const { return counters_[static_cast<size_t>(index)]; }

 private:
  bool Ready(const Step& step) const;
  void Complete(const Step& step);
  void Increase(int counter);
  void Wake(std::vector<int>* waiting);

  const Model& model_;
  const std::vector<std::vector<int>> tracks_;
  const bool pacing_;
  const Relaxed relaxed_;
  std::vector<size_t> cursors_;
  std::vector<int> runnable_;
  std::vector<int64_t> counters_;
  std::vector<char> events_;
  std::vector<std::vector<int>> counter_waiters_;  // tracks
  std::vector<std::vector<int>> event_waiters_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_SIMULATE_H_
