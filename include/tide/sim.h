// Predicts how long the programs of a call take on a machine, and what they wait for
// (docs/simulation.md).
//
//   std::vector<Program> programs = ...;  // one a rank
//   SimulationResult result = Simulate(programs, MachinePreset("h200"), {});
//   result.seconds;        // until the last rank is done
//   result.critical_path;  // what it was doing all the time
//
// Simulated is what the nccl fabric executes: the commands that its lowering makes of a program.
// Deterministic; no clock, no device.
#ifndef TIDE_SIM_H_
#define TIDE_SIM_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tide/machine.h"
#include "tide/plan.h"
#include "tide/program.h"

namespace tide {

struct SimulationOptions {
  // CTAs of a sum or a landing, at most the multiprocessors; 0: as a calibration of the machine
  // chose, else DefaultSumCtas, as on the fabric.
  int sum_ctas = 0;
  // False leaves out all that is tagged pacing.
  bool pacing = true;
  // When the caller of each rank is ready; empty: all at 0.
  std::vector<double> ready_s;
  // Called now and then; may throw to give up (Ctrl-C).
  std::function<void()> check_interrupt = [] {};
};

// One operation of a stream, or a part of it: a batch is cut where it goes to another rank.
struct SimulatedSpan {
  int rank = 0;
  std::string stream;
  std::string what;
  double start_s = 0;
  double end_s = 0;
  double bytes = 0;  // moved, or read and written by a kernel
};

// What a rank has of its own, over the whole simulation.
struct SimulatedResource {
  int rank = 0;
  std::string name;  // "NVLink out", "memory", ...
  double busy_s = 0;
  double bytes = 0;     // multiprocessors: 0
  double share_of = 0;  // of what it could have moved until the end
};

// The longest time in which a stream had nothing to do but wait.
struct SimulatedWait {
  int rank = 0;
  std::string stream;
  double waited_s = 0;  // all waits of the stream together
  double longest_s = 0;
  std::string before;  // the operation that came next
  std::string cause;   // the operation that it waited for, and its rank
};

// Seconds of the critical path by what set the pace: a resource, "a kernel's own rate", "launches",
// "memory operations", ...
struct SimulatedLimit {
  std::string name;
  double seconds = 0;
};

struct SimulationResult {
  double seconds = 0;
  std::vector<double> rank_seconds;
  std::vector<SimulatedResource> resources;  // used ones, by rank
  std::vector<SimulatedWait> waits;          // streams that waited, by rank
  std::vector<SimulatedLimit> limits;        // by falling seconds; they add up to `seconds`
  std::vector<SimulatedSpan> critical_path;  // by time
  std::vector<SimulatedSpan> timeline;       // by start; without what takes no time
};

// `programs`: one a rank, of one call. Throws Error(kInvalidArgument) if the model lacks a number
// or if an operation can never run, with its text.
SimulationResult Simulate(const std::vector<Program>& programs, const MachineModel& machine,
                          const SimulationOptions& options);

// A training step of equal layers under FSDP2 with its default prefetch (docs/simulation.md).
struct TrainingStep {
  int layers = 1;
  double forward_s = 0;  // compute of a layer
  double backward_s = 0;
  double optimizer_s = 0;
  // Memory traffic of compute, reads plus writes, by which collectives beside it slow it down; 0:
  // they don't.
  double compute_gb_per_s = 0;
  Mode mode = Mode::kInPlace;
  // kInPlace: the all-gather of layer l - 2 is issued behind the reduce-scatter of layer l.
  bool early_all_gather = true;
  int landing_slots = 2;  // at least as many as default prefetch needs
  // The backward refreshes what lies where the forward has left it; all is equal there. One node.
  bool keep_landings = false;
};

// Throws Error(kInvalidArgument) for layers, slots, times and rates that no step has.
void CheckStep(const TrainingStep& step);

// The calls of one layer, a program a rank. Reduce-scatters of one node use the first bank only.
struct LayerPrograms {
  std::vector<Program> all_gather;
  std::vector<Program> refresh;            // empty: landings are not kept
  std::vector<Program> reduce_scatter[2];  // by bank
  int64_t gradient_bytes = 0;              // of the unsharded layer
};

// From the first all-gather to the end of the optimizer. Throws as Simulate.
SimulationResult SimulateStep(const LayerPrograms& layer, const TrainingStep& step,
                              const MachineModel& machine, const SimulationOptions& options);

// What is simulated for a request that leaves it open: the fabric's defaults.
struct SimulationReportOptions {
  AllGatherOptions all_gather;
  ReduceScatterOptions reduce_scatter;  // staging.slot_bytes: the upper bound of a slot
  SimulationOptions simulation;
  bool timeline = false;  // also every operation with its times
};

// `operation`, "all-gather" or "reduce-scatter", of every group of a request of PlanReport: times,
// the wire's floor and what limits it, as JSON (docs/simulation.md). Throws
// Error(kInvalidArgument).
std::string SimulationReport(const std::string& request_json, const std::string& operation,
                             const SimulationReportOptions& options);

// A step whose layers are the request's only group, in the mode of the request or of `step`, as
// JSON. Throws Error(kInvalidArgument).
std::string StepReport(const std::string& request_json, const TrainingStep& step,
                       const SimulationReportOptions& options);

}  // namespace tide

#endif  // TIDE_SIM_H_
