// Discrete events: tasks that wait for each other, last a while and move bytes.
//
// A task starts when all that it follows have ended, each with its lag. It lasts `delay`, then its
// flow runs at the rate that Sharing gives it. The engine knows neither ranks nor operations.
#ifndef TIDE_SIM_ENGINE_H_
#define TIDE_SIM_ENGINE_H_

#include <functional>
#include <vector>

#include "sim/sharing.h"

namespace tide::sim {

struct Dependency {
  int task = 0;
  double lag = 0;  // seconds
};

struct Work {
  std::vector<Dependency> after;
  double delay = 0;  // seconds
  Flow flow;         // no bytes: the delay alone
};

struct Timing {
  double start = 0;
  double flows = 0;  // start of the flow
  double end = 0;
  int cause = -1;  // the task whose end was waited for last; -1: none
  LimitedBy limited{};
};

struct Outcome {
  std::vector<Timing> timings;
  std::vector<ResourceTime> resources;
  std::vector<int> stuck;  // tasks that never start
};

// Dependencies name tasks by index, in any order. `check_interrupt` is called now and then.
Outcome Run(const std::vector<Work>& tasks, const std::vector<double>& capacities,
            const std::function<void()>& check_interrupt);

}  // namespace tide::sim

#endif  // TIDE_SIM_ENGINE_H_
