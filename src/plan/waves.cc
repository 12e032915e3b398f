#include "plan/waves.h"

#include <fmt/format.h>

#include <algorithm>

#include "tide/error.h"

namespace tide::internal {

int WidestWave(const Topology& topology) {
  return topology.local_ranks == 1 ? kExpertWaveWidth : topology.local_ranks;
}

std::vector<Wave> CutIntoWaves(const Topology& topology, int width) {
  std::vector<Wave> waves;
  width = std::min(width, topology.nodes);  // the sums below stay small
  for (int first = 1; first <= topology.nodes; first += width) {
    waves.push_back({first, std::min(width, topology.nodes + 1 - first)});
  }
  return waves;
}

std::vector<Round> CutIntoRounds(const Topology& topology, const std::vector<Wave>& waves, int k) {
  if (k < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("round width k: expected at least 1, got {}", k));
  }
  k = std::min(k, topology.nodes);  // as above
  std::vector<Round> rounds;
  for (size_t w = 0; w < waves.size(); ++w) {
    const int end = std::min(waves[w].end(), topology.nodes);  // the own node needs no transfer
    for (int first = waves[w].first; first < end; first += k) {
      rounds.push_back({static_cast<int>(w), first, std::min(k, end - first)});
    }
  }
  return rounds;
}

std::vector<Round> RoundsOf(const Topology& topology, int wave_width, int k) {
  return CutIntoRounds(topology, CutIntoWaves(topology, wave_width), k);
}

int OutboxDepth(const Topology& topology, const std::vector<Round>& rounds, int passes, Mode mode) {
  if (mode == Mode::kInPlace) return passes * (topology.nodes - 1);
  if (rounds.empty()) return 0;
  int depth = passes > 1 ? rounds.front().count + rounds.back().count : rounds.front().count;
  for (size_t i = 1; i < rounds.size(); ++i) {
    depth = std::max(depth, rounds[i].count + rounds[i - 1].count);
  }
  return depth;
}

int GenerationsOf(const Topology& topology, int wave_width, int passes) {
  if (topology.nodes == 1) return 0;
  const bool once = topology.nodes <= wave_width && passes == 1;
  return once && topology.local_ranks > 1 ? 1 : 2;
}

std::vector<int> FindCollision(const Topology& topology, const std::vector<Wave>& waves) {
  for (const Wave& wave : waves) {
    std::vector<int> holder(static_cast<size_t>(topology.local_ranks), 0);
    for (int c = wave.first; c < wave.end(); ++c) {
      // The rotation is the same for every sub-slice, so one stands for all.
      int& seen = holder[static_cast<size_t>(ReceivingLocal(topology, 0, c))];
      if (seen != 0) return {seen, c};
      seen = c;
    }
  }
  return {};
}

std::vector<int> AllowedWaveWidths(const Topology& topology) {
  std::vector<int> allowed;
  for (int width = 1; width <= topology.local_ranks; ++width) {
    if (FindCollision(topology, CutIntoWaves(topology, width)).empty()) allowed.push_back(width);
  }
  return allowed;
}

}  // namespace tide::internal
