// Proof that the programs of all ranks are safe together (docs/design.md).
//
//   VerifySetup setup{.topology = {1, 4}, .groups = {{layout, shard_dtypes, reduce}}};
//   VerifyResult result = VerifyReduceScatter(setup, {});
//   if (!result.ok()) std::cerr << ToText(result);
//
// Three questions are asked of every sequence of calls: can a queue stay blocked (also with all
// queues of a rank collapsed into one FIFO); are two accesses to the same bytes unordered, one of
// them a write (with all pacing removed); does every result hold exactly what the collective
// promises. The caller of the collectives is part of the model. So is a predecessor that touched
// every byte of the lane's regions, so that the answer holds for every sequence, not for a sample.
#ifndef TIDE_VERIFY_H_
#define TIDE_VERIFY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tide/layout.h"
#include "tide/plan.h"
#include "tide/program.h"

namespace tide {

enum class FindingKind : uint8_t {
  kMalformed,    // a program breaks a rule of tide/program.h
  kOutOfBounds,  // a piece leaves its buffer
  kUnbalanced,   // increments produced and declared differ
  kStuck,        // a queue waits for something that never happens
  kAmbiguous,    // pieces of a later put can satisfy a wait before those that it is for
  kRace,         // two unordered accesses to the same bytes, one of them a write
  kWrongValue,   // a result or an operand is not what it must be
};
const char* Name(FindingKind kind);

// An operation of one rank in one call; `operation` is its text, or what the caller did.
struct Site {
  int call = -1;
  int rank = -1;
  std::string operation;
};

struct Finding {
  FindingKind kind = FindingKind::kMalformed;
  Site first;
  Site second;         // races: the access that came first in the simulated schedule
  std::string region;  // "staging[1] of rank 0"; empty if the finding has none
  int64_t begin = 0;   // byte range of the region
  int64_t end = 0;
  std::string detail;
};

struct VerifyStats {
  int64_t sequences = 0;
  int64_t calls = 0;
  int64_t operations = 0;
  int64_t accesses = 0;  // runs of bytes read or written
  int64_t pairs = 0;     // pairs of accesses whose order was checked
};

struct VerifyResult {
  std::vector<Finding> findings;  // the first VerifyOptions::max_findings
  VerifyStats stats;

  bool ok() const { return findings.empty(); }
  // Appends another result: statistics add up.
  void Add(VerifyResult other);
};

// Who holds the landing that parameters are read from.
enum class LandingModel : uint8_t {
  kRank,  // every rank its own; a multicast writes to all of them
  kNode,  // one memory a node, which all its ranks read; a multicast writes once
};

struct VerifyOptions {
  LandingModel landing = LandingModel::kRank;
  int max_findings = 20;
  // Called now and then; may throw to give up (Ctrl-C).
  std::function<void()> check_interrupt = [] {};
};

// A parameter group as one rank holds it, and how its gradients are reduced.
struct VerifyGroup {
  GroupLayout layout;
  std::vector<DType> shard_dtypes;  // one a parameter
  ReduceScatterSpec reduce;         // `bank` is set for each call
};

struct VerifySetup {
  Topology topology;
  AllGatherOptions all_gather;
  ReduceScatterOptions reduce_scatter;
  std::vector<VerifyGroup> groups;
};

// All-gathers: all groups in turn, twice, on two alternating landings and on a landing each; and
// each group after a worst-case predecessor of each group. On one node also refreshes: again and
// again, and after an all-gather and a refresh elsewhere. Throws what the planner throws.
VerifyResult VerifyAllGather(const VerifySetup& setup, const VerifyOptions& options);

// Reduce-scatters: all groups in turn, twice, with alternating banks; and each group after
// worst-case predecessors on both banks.
VerifyResult VerifyReduceScatter(const VerifySetup& setup, const VerifyOptions& options);

// Both lanes, overlapping as in a backward pass: gather, reduce, gather the next; on one node also
// with the first two gathers refreshes of what a forward has left. With Mode::kSlotReuse gradients
// lie in the landing that their parameters have left.
VerifyResult VerifyTraining(const VerifySetup& setup, const VerifyOptions& options);

// One paragraph a finding, then a line of statistics.
std::string ToText(const Finding& finding);
std::string ToText(const VerifyResult& result);

}  // namespace tide

#endif  // TIDE_VERIFY_H_
