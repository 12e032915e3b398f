// Contributors, waves and rounds of the reduce-scatter's second level (paper, section 4.2).
//
// Seen from a destination node m, the partial of node n is contributor c = (m - n) mod M, and the
// own node is contributor M, the last (equation 6). Waves cut c = 1..M into runs of `width`; rounds
// cut the remote contributors of one wave into runs of at most k.
#ifndef TIDE_PLAN_WAVES_H_
#define TIDE_PLAN_WAVES_H_

#include <vector>

#include "tide/layout.h"
#include "tide/plan.h"

namespace tide::internal {

// Contributors [first, first + count), all landed together.
struct Wave {
  int first = 1;
  int count = 0;

  int end() const { return first + count; }
};

// Remote contributors [first, first + count) of one wave, whose transfers are under way together.
struct Round {
  int wave = 0;
  int first = 1;
  int count = 0;
};

// Sources that one sum of an expert lane (L = 1) adds in one pass, and so its widest wave (paper,
// appendix F).
inline constexpr int kExpertWaveWidth = 8;
// The widest wave that one landing is meant to add: L, or kExpertWaveWidth where L = 1.
int WidestWave(const Topology& topology);

// Waves of M contributors, width >= 1.
std::vector<Wave> CutIntoWaves(const Topology& topology, int width);

// Throws Error(kInvalidArgument) for k < 1.
std::vector<Round> CutIntoRounds(const Topology& topology, const std::vector<Wave>& waves, int k);

// Rounds of one pass. Throws Error(kInvalidArgument) for k < 1.
std::vector<Round> RoundsOf(const Topology& topology, int wave_width, int k);

// n_out: blocks of one outbox bank (equation 9). In place every remote block has its own; slot
// reuse covers two consecutive rounds, also across the border of two passes.
int OutboxDepth(const Topology& topology, const std::vector<Round>& rounds, int passes, Mode mode);

// n_par: one for a single wave in a single pass, else two; two for an expert lane, none on one
// node.
int GenerationsOf(const Topology& topology, int wave_width, int passes);

// The sub-slice that local rank j reduces as contributor c (equation 7). It is also the inbox block
// that its partial goes to.
constexpr int SubSlice(const Topology& topology, int local, int contributor) {
  return (local + contributor % topology.nodes) % topology.local_ranks;
}

// The local rank of the destination node that receives contributor c's partial of sub-slice s
// (equation 8).
constexpr int ReceivingLocal(const Topology& topology, int slice, int contributor) {
  const int rotation = contributor % topology.nodes % topology.local_ranks;
  return (slice - rotation + topology.local_ranks) % topology.local_ranks;
}

// The two contributors of one wave that meet on one local rank, as {c, c'}; empty if there are
// none (proposition 4.1, checked and not assumed).
std::vector<int> FindCollision(const Topology& topology, const std::vector<Wave>& waves);

// Wave widths that let latin_square place the contributors of every wave on distinct local ranks.
std::vector<int> AllowedWaveWidths(const Topology& topology);

}  // namespace tide::internal

#endif  // TIDE_PLAN_WAVES_H_
