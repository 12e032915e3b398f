// A training step as FSDP2 enqueues it, with TIDE's collectives.
//
// The host enqueues ahead of the GPUs, so this is the order of one thread; what runs when is up to
// the streams. `compute` is the caller's stream, `sources` FSDP2's for copy-in, which all-gathers
// follow, and `reduce` the one that reduce-scatters follow and precede.
//
//   forward(l)    gather(l); compute follows it; forward; the slot is free
//   backward(l)   compute follows gather(l); gather(l - 1); backward; reduce(l)
//   reduce(l)     compute follows reduce(l + 1) first: then FSDP2 frees what that one read
// With kept landings the first gathers of the backward find the last layers in their slots, and are
// refreshes.
// A gather follows the compute that last read its slot; in the forward also the start of the layer
// before the last, in the backward that of the layer it was issued in.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "sim/rates.h"
#include "sim/summary.h"
#include "sim/translate.h"
#include "tide/error.h"
#include "tide/sim.h"

namespace tide {
namespace {

using sim::kNoTask;
using Tasks = std::vector<int>;  // one a rank

constexpr double kMilli = 1e3;       // seconds to milliseconds
constexpr double kMostMs = 1e6;      // of one kernel: more is a unit mistake,
constexpr double kMostGbPerS = 1e9;  // as of a rate
constexpr int kFewestSlots = 2;      // landings, as default prefetch needs
constexpr int kNoLayer = -1;

// A free landing slot: the tasks that last used it, and the layer that lies there.
struct FreeSlot {
  Tasks used;
  int layer = kNoLayer;
};

void CheckNumber(const char* what, const char* unit, double value, double most) {
  if (value >= 0 && value <= most) return;  // false of NaN
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: expected 0 to {:g} {}, got {:g}", what, most, unit, value));
}

class Step {
 public:
  Step(const LayerPrograms& layer, const TrainingStep& step, const sim::Rates& rates,
       sim::Translator* translator)
      : layer_(layer),
        step_(step),
        rates_(rates),
        translator_(*translator),
        ranks_(layer.all_gather.size()),
        slots_(Slots(step), {Tasks(ranks_, kNoTask), kNoLayer}),
        gathered_(static_cast<size_t>(step.layers)),
        copied_out_(ranks_, kNoTask),
        reduced_(ranks_, kNoTask) {
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const auto add = [&](const char* name) {
        return translator_.AddStream(static_cast<int>(rank), name);
      };
      compute_.push_back(add("compute"));
      sources_.push_back(add("FSDP2: copy-in"));
      reduce_.push_back(add("FSDP2: reduce-scatter"));
    }
  }

  // Returns the tasks that end the step.
  Tasks Enqueue() {
    for (int l = 0; l < step_.layers; ++l) Forward(l);
    for (int l = step_.layers - 1; l >= 0; --l) Backward(l);
    Follow(compute_, reduced_);
    if (step_.optimizer_s > 0) Compute(step_.optimizer_s, "optimizer");
    return Tail(compute_);
  }

 private:
  // More slots than layers stay empty.
  static size_t Slots(const TrainingStep& step) {
    return static_cast<size_t>(
        std::clamp(step.landing_slots, kFewestSlots, std::max(kFewestSlots, step.layers)));
  }

  void Forward(int l) {
    Gather(l);
    Follow(compute_, gathered(l));
    Follow(sources_, copied_out_);
    copied_out_ = Tail(compute_);
    Compute(step_.forward_s, "forward " + std::to_string(l));
    gathered(l).clear();
    slots_.push_back({Tail(compute_), l});
  }

  void Backward(int l) {
    Gather(l);
    Follow(compute_, gathered(l));
    Follow(sources_, Tail(compute_));
    if (l > 0) Gather(l - 1);
    Compute(step_.backward_s, "backward " + std::to_string(l));
    const bool in_place = step_.mode == Mode::kInPlace;
    if (in_place) {
      slots_.push_back({Tail(compute_), kNoLayer});
    } else {
      CopyGradients(l);
    }
    Follow(compute_, reduced_);
    Follow(reduce_, Tail(compute_));
    reduced_ = translator_.AddCall(layer_.reduce_scatter[bank_], Tail(reduce_));
    Follow(reduce_, reduced_);
    if (layer_.all_gather[0].topology.nodes > 1) bank_ = 1 - bank_;
    if (!in_place) slots_.push_back({reduced_, kNoLayer});
    if (in_place && step_.early_all_gather && l > 1) Gather(l - 2);
  }

  // Unless it has been enqueued already. What lies in a slot still is refreshed there.
  void Gather(int l) {
    if (!gathered(l).empty()) return;
    TIDE_CHECK(!slots_.empty());
    auto slot = std::find_if(slots_.begin(), slots_.end(),
                             [l](const FreeSlot& free) { return free.layer == l; });
    const bool kept = step_.keep_landings && !layer_.refresh.empty() && slot != slots_.end();
    if (!kept) slot = slots_.begin();  // of the free slots the one freed first
    Follow(sources_, slot->used);
    slots_.erase(slot);
    gathered(l) = translator_.AddCall(kept ? layer_.refresh : layer_.all_gather, Tail(sources_));
  }

  // Into the slot that the layer has just left, on the stream of compute.
  void CopyGradients(int l) {
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const double seconds = rates_.ElementwiseCopy(static_cast<double>(layer_.gradient_bytes));
      translator_.AddCompute(compute_[rank], seconds, rates_.memory_gb_per_s(),
                             "gradients of " + std::to_string(l));
    }
  }

  void Compute(double seconds, const std::string& what) {
    for (const int stream : compute_) {
      translator_.AddCompute(stream, seconds, step_.compute_gb_per_s, what);
    }
  }

  void Follow(const std::vector<int>& streams, const Tasks& tasks) {
    for (size_t rank = 0; rank < ranks_; ++rank) {
      translator_.Follow(streams[rank], tasks[rank], rates_.event());
    }
  }

  Tasks Tail(const std::vector<int>& streams) {
    Tasks tails;
    for (const int stream : streams) tails.push_back(translator_.Tail(stream));
    return tails;
  }

  Tasks& gathered(int l) { return gathered_[static_cast<size_t>(l)]; }

  const LayerPrograms& layer_;
  const TrainingStep& step_;
  const sim::Rates& rates_;
  sim::Translator& translator_;
  const size_t ranks_;
  std::vector<int> compute_, sources_, reduce_;  // streams, one a rank
  std::deque<FreeSlot> slots_;
  std::vector<Tasks> gathered_;  // by layer; empty: not gathered
  Tasks copied_out_;
  Tasks reduced_;
  int bank_ = 0;
};

}  // namespace

void CheckStep(const TrainingStep& step) {
  if (step.layers < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layers: expected at least 1, got {}", step.layers));
  }
  if (step.landing_slots < kFewestSlots) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("slots: expected at least {}, got {}",
                                                         kFewestSlots, step.landing_slots));
  }
  CheckNumber("forward", "ms", step.forward_s * kMilli, kMostMs);
  CheckNumber("backward", "ms", step.backward_s * kMilli, kMostMs);
  CheckNumber("optimizer", "ms", step.optimizer_s * kMilli, kMostMs);
  CheckNumber("compute", "GB/s", step.compute_gb_per_s, kMostGbPerS);
}

SimulationResult SimulateStep(const LayerPrograms& layer, const TrainingStep& step,
                              const MachineModel& machine, const SimulationOptions& options) {
  CheckStep(step);
  const size_t ranks = layer.all_gather.size();
  if (ranks == 0 || ranks != layer.reduce_scatter[0].size() ||
      (!layer.refresh.empty() && layer.refresh.size() != ranks)) {
    throw Error(ErrorCode::kInvalidArgument,
                "training step: expected programs of both collectives, one a rank");
  }
  const sim::Rates rates(machine, options.sum_ctas);
  sim::Translator translator(layer.all_gather[0].topology, rates, options.check_interrupt);
  const auto ends = Step(layer, step, rates, &translator).Enqueue();
  const auto capacities = rates.Capacities(static_cast<int>(ends.size()));
  const auto outcome = sim::RunTasks(translator, capacities, options.check_interrupt);
  return sim::Summarise(translator, outcome, capacities, ends);
}

}  // namespace tide
