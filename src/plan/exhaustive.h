// The pieces of VerifyExhaustive: which inbox blocks a wave writes and clears, and what the switch
// would then read.
//
// A node's inbox of one generation is L x L blocks: block s on local rank j is bit j * L + s. The
// switch reduces block s over all j, so every block must hold this wave's partial or zero.
#ifndef TIDE_PLAN_EXHAUSTIVE_H_
#define TIDE_PLAN_EXHAUSTIVE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plan/waves.h"

namespace tide::internal {

using BlockMask = uint64_t;
inline constexpr int kMaxMaskLocals = 8;

// What one call does to the inbox, one entry a wave instance x = pass * W + w; instance x uses
// generation x mod `generations`.
struct InboxSchedule {
  int generations = 1;
  std::vector<BlockMask> writes;
  std::vector<BlockMask> zeroes;
};

// The blocks that wave's contributors write, the own node's included.
BlockMask WrittenBlocks(const Topology& topology, const Wave& wave);

// The planner's rule: the first instance of a call on a generation clears every block that it does
// not write, a later one what its predecessor there wrote and it does not.
InboxSchedule PlannedInbox(const Topology& topology, const std::vector<Wave>& waves, int passes,
                           int generations);

// Runs the schedule from an inbox full of a predecessor's partials. Empty, or what the switch would
// read that it must not.
std::string FindStaleBlock(const Topology& topology, const InboxSchedule& schedule);

// Empty if round i, over all passes, finds its outbox blocks free once round i - 2 has been sent
// (or no round at all where `depth` covers the whole call); else the round that does not.
std::string FindOutboxOverlap(const std::vector<Round>& rounds, int passes, int depth);

}  // namespace tide::internal

#endif  // TIDE_PLAN_EXHAUSTIVE_H_
