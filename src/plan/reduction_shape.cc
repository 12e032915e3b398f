#include "plan/reduction_shape.h"

#include <fmt/format.h>

#include <algorithm>

#include "tide/error.h"

namespace tide::internal {
namespace {

int64_t Divide(int64_t value, int64_t parts) {
  return AlignUp((value + parts - 1) / parts, kSpanAlignment);
}

void CheckOptions(const Topology& topology, const ReduceScatterOptions& options) {
  const auto refuse = [](const char* what, const char* allowed, int got) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("reduce_scatter: {}: expected {}, got {}", what, allowed, got));
  };
  if (options.wave_width < 0) refuse("wave width", "0 (default) or more", options.wave_width);
  if (options.round_width < 1) refuse("round width k", "at least 1", options.round_width);
  if (options.passes < 1) refuse("passes n_part", "at least 1", options.passes);
  if (options.passes > kMostPasses) {
    refuse("passes n_part", fmt::format("at most {}", kMostPasses).c_str(), options.passes);
  }
  if (options.contexts < 1 || options.contexts > kMaxContexts) {
    refuse("contexts", "1 to 4", options.contexts);
  }
  if (options.staging.slots < 1) refuse("staging slots", "at least 1", options.staging.slots);
  if (options.generations < 0 || options.generations > 2) {
    refuse("inbox generations n_par", "0 (default), 1 or 2", options.generations);
  }
  if (options.passes > 1 && topology.nodes == 1) {
    refuse("passes n_part on one node", "1, because nothing is kept for other nodes",
           options.passes);
  }
}

void CheckCollisions(const Topology& topology, const std::vector<Wave>& waves, int width) {
  const std::vector<int> pair = FindCollision(topology, waves);
  if (pair.empty()) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("latin_square over {} nodes of {} local ranks: with wave width {} "
                          "contributors {} and {} of one wave meet on one local rank; allowed "
                          "widths are {} (every divisor of the local ranks is)",
                          topology.nodes, topology.local_ranks, width, pair[0], pair[1],
                          fmt::join(AllowedWaveWidths(topology), ", ")));
}

}  // namespace

ReductionShape::ReductionShape(const ShardSpan& span, const ReduceScatterSpec& spec,
                               const Topology& topology, const ReduceScatterOptions& options)
    : topology_(topology),
      options_(options),
      bank_(spec.bank),
      latin_(options.placement == Placement::kLatinSquare && topology.nodes > 1 &&
             topology.local_ranks > 1),
      line_(span.elems()) {
  CheckOptions(topology, options);
  const int width = options.wave_width > 0 ? options.wave_width : WidestWave(topology);
  waves_ = CutIntoWaves(topology, width);
  rounds_ = CutIntoRounds(topology, waves_, options.round_width);
  if (latin_) CheckCollisions(topology, waves_, width);

  slice_ = latin_ ? Divide(line_, topology.local_ranks) : line_;
  part_ = Divide(slice_, options.passes);
  if (topology.local_ranks == 1 && topology.nodes > 1) {
    wire_ = span.common_dtype();
    own_from_gradient_ = span.uniform();
  }
  needs_accumulator_ = spec.output_dtype != DType::kF32 && waves_.size() > 1;

  generations_ = options.generations > 0 ? options.generations
                                         : GenerationsOf(topology, width, options.passes);
  outbox_blocks_ = OutboxDepth(topology, rounds_, options.passes, options.mode);
}

Interval ReductionShape::Part(int slice, int pass) const {
  const int64_t slice_end = std::min((slice + 1) * slice_, line_);
  const int64_t begin = std::min(slice * slice_ + pass * part_, slice_end);
  return {begin, std::min(begin + part_, slice_end)};
}

Instance ReductionShape::At(int index) const {
  const auto waves = static_cast<int>(waves_.size());
  // A single wave alternates from call to call, so that consecutive calls overlap; several waves
  // alternate within the call, and every call starts with generation 0, so that the contributors
  // that use a generation first are the same in every call.
  const int turn = waves == 1 ? index + bank_ : index;
  return {index, index / waves, index % waves, turn % generations_};
}

int ReductionShape::NextWave(const Instance& instance) const {
  const auto waves = static_cast<int>(waves_.size());
  if (NextIsHere(instance)) return (instance.index + generations_) % waves;
  return instance.generation % waves;
}

bool ReductionShape::Contains(int wave, int contributor) const {
  const Wave& w = waves_[static_cast<size_t>(wave)];
  return contributor >= w.first && contributor < w.end();
}

int ReductionShape::inbox_blocks() const {
  if (latin_) return topology_.local_ranks;
  int most = 0;
  for (const Wave& wave : waves_) {
    most = std::max(most, std::min(wave.end(), topology_.nodes) - wave.first);
  }
  return most;
}

}  // namespace tide::internal
