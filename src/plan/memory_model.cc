#include "plan/memory_model.h"

#include <algorithm>

namespace tide::internal {
namespace {

int64_t CeilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }

int64_t StageBytes(const MemoryShape& shape) {
  // One rank a node doubles from landing to landing; one node has nothing to receive.
  if (shape.topology.nodes == 1 || shape.topology.local_ranks == 1) return 0;
  return (shape.topology.nodes - (shape.cast ? 0 : 1)) * shape.shard_bytes;
}

// Equation 10 counts a slot for every local rank; `direct` has no need of the paper's bound.
int64_t StagingPeers(const MemoryShape& shape) {
  const int local = shape.topology.local_ranks;
  const bool paper = shape.placement == Placement::kLatinSquare && shape.topology.nodes > 1;
  return local == 1 || !paper ? local - 1 : local;
}

}  // namespace

RegionBytes FormulaRegions(const MemoryShape& shape) {
  const Topology& topology = shape.topology;
  RegionBytes bytes;
  bytes.stage = StageBytes(shape);
  const int64_t slot = CeilDiv(shape.grad_bytes, shape.passes);
  bytes.staging = StagingPeers(shape) * shape.staging_slots * slot;
  if (topology.nodes == 1) return bytes;

  const auto rounds = RoundsOf(topology, shape.wave_width, shape.round_width);
  const int depth = OutboxDepth(topology, rounds, shape.passes, shape.mode);
  // Expert lanes send gradients as they are, unless their dtypes differ, and keep no partial of
  // their own.
  const bool expert = topology.local_ranks == 1;
  const bool plain = expert && !shape.mixed_grads;
  const int64_t block = CeilDiv(plain ? shape.grad_bytes : shape.fp32_bytes, shape.passes);
  // The latin square spreads a wave over the node, so every rank has a block for each sub-slice.
  const bool square = !expert && shape.placement == Placement::kLatinSquare;
  bytes.outbox = depth * block;
  bytes.spare = plain ? 0 : shape.passes * block;
  bytes.inbox =
      (square ? topology.local_ranks : std::min(shape.wave_width, topology.nodes - 1)) * block;
  bytes.generations = GenerationsOf(topology, shape.wave_width, shape.passes);
  const bool several_waves = topology.nodes > shape.wave_width;
  bytes.accumulator = shape.narrow_output && several_waves ? shape.fp32_bytes : 0;
  return bytes;
}

}  // namespace tide::internal
