// What the timings of a simulation say: who was busy, who waited, and for what.
#ifndef TIDE_SIM_SUMMARY_H_
#define TIDE_SIM_SUMMARY_H_

#include <functional>
#include <vector>

#include "sim/engine.h"
#include "sim/translate.h"
#include "tide/sim.h"

namespace tide::sim {

// Runs the tasks. Throws Error(kInvalidArgument) if one of them can never start.
Outcome RunTasks(const Translator& translator, const std::vector<double>& capacities,
                 const std::function<void()>& check_interrupt);

// `ends`: the task that ends each rank.
SimulationResult Summarise(const Translator& translator, const Outcome& outcome,
                           const std::vector<double>& capacities, const std::vector<int>& ends);

}  // namespace tide::sim

#endif  // TIDE_SIM_SUMMARY_H_
