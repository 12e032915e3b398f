// How large a lane's regions are, which options suit a machine and a memory limit, and why.
//
//   SizingRequest request;
//   request.topology = {.nodes = 8, .local_ranks = 8};
//   request.groups = {group};  // see SizedGroup
//   request.machine = MachinePreset("paper-8-nodes");
//   Sizing sizing = ChooseSizes(request);
//   sizing.reduce_scatter;     // hand to PlanReduceScatter
//   sizing.choices;            // every choice, in words
//
// Pure arithmetic: no I/O, no clock, no device.
#ifndef TIDE_SIZING_H_
#define TIDE_SIZING_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tide/machine.h"
#include "tide/plan.h"

namespace tide {

// A group and what its calls look like.
struct SizedGroup {
  GroupLayout layout;
  std::vector<DType> shard_dtypes;  // one a parameter
  ReduceScatterSpec spec;
};

// What is asked for; nullopt means: choose.
struct SizingRequest {
  Topology topology;
  std::vector<SizedGroup> groups;
  MachineModel machine;
  std::optional<Mode> mode;
  std::optional<Placement> placement;
  bool resident = true;  // shards of the gather dtype lie in the arena
  std::optional<int> wave_width;
  std::optional<int> round_width;
  std::optional<int> passes;
  std::optional<int64_t> chunk_bytes;
  std::optional<int64_t> memory_limit_bytes;  // of LaneMemory::live
};

// Bytes of one rank by region. `regions` holds what TIDE reserves, or what the formula says.
struct LaneMemory {
  RegionBytes regions;
  int64_t landings = 0;   // two slots of the largest group
  int64_t gradients = 0;  // in_place: the previous layer's, still live; else 0
  // During one layer's backward (paper, section 5.4).
  int64_t live() const { return landings + regions.stage + regions.reduce_scatter() + gradients; }
};

// One decision in words: what, the value, and why not another.
struct Choice {
  std::string what;
  std::string value;
  std::string why;
};

struct Sizing {
  AllGatherOptions all_gather;
  ReduceScatterOptions reduce_scatter;  // passes: of the largest group
  std::vector<int> passes;              // one a group
  int outbox_depth = 0;                 // n_out, blocks a bank, of the largest group
  int generations = 0;                  // n_par, of the largest group
  int sum_ctas = 0;                     // 0: nothing to do
  int landing_ctas = 0;
  LaneMemory reserved;             // the planner's own regions
  LaneMemory formula;              // equation 10 in general form
  int64_t full_landing_bytes = 0;  // NS of the largest group, without alignment
  int64_t stock_live_bytes = 0;    // what FSDP2 holds where TIDE holds `live`
  std::vector<Choice> choices;
};

// Solves equations 13 and 14 and the rule for k, and fits the memory limit. Throws
// Error(kInvalidArgument) for what no plan can satisfy: the rule, and what would be allowed.
Sizing ChooseSizes(const SizingRequest& request);

// Connections that one lane opens on one rank.
struct LaneConnections {
  int64_t queue_pairs = 0;        // 2 * n_ctx * (M - 1): the rail communicator
  int64_t queue_pairs_all = 0;    // 2 * n_ctx * (N - 1): one communicator over all ranks
  int64_t barrier_steps = 0;      // n_ctx * M^2, while connecting
  int64_t barrier_steps_all = 0;  // n_ctx * N^2
  int progress_threads = 0;       // one busy thread for each communicator that puts
};
LaneConnections ConnectionsOf(const Topology& topology, int contexts);

// What one rank submits in one call, counted from its program.
struct ProgramCounts {
  int64_t operations = 0;
  int64_t descriptors = 0;  // pieces of copies and multicasts
  int64_t transfers = 0;    // put operations: one block or one slot range to one peer
  int64_t puts = 0;         // their pieces; each increments one remote signal
  int64_t put_bytes = 0;
  int64_t signals = 0;  // to peers, puts not counted
  int64_t waits = 0;
  int64_t sums = 0;      // pieces of sums
  int64_t landings = 0;  // landing operations
  int64_t zeroed_pieces = 0;
};
ProgramCounts CountProgram(const Program& program);

// The fields of a request to PlanReport; those below them are named where one is refused.
std::vector<std::string> ReportRequestFields();

// A plan as JSON for a request in JSON (docs/memory.md): groups, topology, options and a machine
// in, sizes, counts and reasons out. Throws Error(kInvalidArgument) with the path of the offending
// field. `check_interrupt`: that of ReduceScatterOptions.
std::string PlanReport(
    const std::string& request_json, const std::function<void()>& check_interrupt = [] {});

// Every latin_square plan over M in [2, max_nodes] and widths 1..L, checked without making its
// program (paper, appendix D).
struct ExhaustiveOptions {
  int max_nodes = 1024;
  int local_ranks = 8;
  std::vector<int> round_widths = {1, 2, 4};
  std::vector<Mode> modes = {Mode::kInPlace, Mode::kSlotReuse};
  std::vector<int> passes = {1, 2, 3, 4};
  // Called now and then; may throw to give up.
  std::function<void()> check_interrupt = [] {};
};

struct RejectedPair {
  int nodes = 0;
  int wave_width = 0;
  int contributor = 0;  // the two that meet
  int other = 0;
};

struct ExhaustiveResult {
  int64_t pairs = 0;
  std::vector<RejectedPair> rejected;
  int64_t variants = 0;                 // round widths times modes
  std::vector<int64_t> accepted_plans;  // one an entry of ExhaustiveOptions::passes
  int64_t rejected_plans = 0;
  std::vector<std::string> failures;  // at most 20 in words
  int64_t failed_plans = 0;
};

// Throws Error(kInvalidArgument) for options out of range.
ExhaustiveResult VerifyExhaustive(const ExhaustiveOptions& options = {});

}  // namespace tide

#endif  // TIDE_SIZING_H_
