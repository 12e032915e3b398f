// Training steps: what hides behind what.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "sim/toy.h"
#include "tide/error.h"
#include "tide/sim.h"

namespace tide {
namespace {

using testing::AllGathers;
using testing::ReduceScatters;
using testing::Toy;

constexpr double kEvents = 200e-6;  // what a few events and waits take on the toy

LayerPrograms MakeLayer(const Topology& topology, Mode mode = Mode::kInPlace) {
  LayerPrograms layer;
  ReduceScatterOptions options;
  options.mode = mode;
  layer.all_gather = AllGathers(topology);
  layer.reduce_scatter[0] = ReduceScatters(topology, options);
  ReduceScatterSpec spec = testing::WholeLayer();
  spec.bank = 1;
  options.staging = {int64_t{1} << 20, 2, int64_t{1} << 18};
  for (int rank = 0; topology.nodes > 1 && rank < topology.Ranks(); ++rank) {
    layer.reduce_scatter[1].push_back(
        PlanReduceScatter(testing::Layer(topology), spec, topology, rank, options));
  }
  const GroupLayout group = testing::Layer(topology);
  for (const ParamLayout& param : group.params()) {
    layer.gradient_bytes += 2 * param.shape.rows * param.shape.row_elems;
  }
  return layer;
}

double Seconds(const LayerPrograms& layer, const TrainingStep& step,
               const MachineModel& machine = Toy()) {
  return SimulateStep(layer, step, machine, {}).seconds;
}

TEST(Training, LongComputeHidesAllButTheEnds) {
  for (const Topology topology : {Topology{1, 4}, {2, 2}, {4, 1}}) {
    const LayerPrograms layer = MakeLayer(topology);
    TrainingStep step;
    step.layers = 4;
    step.forward_s = 0.1;
    step.backward_s = 0.2;
    step.optimizer_s = 0.05;
    const double gather = Simulate(layer.all_gather, Toy(), {}).seconds;
    const double reduce = Simulate(layer.reduce_scatter[0], Toy(), {}).seconds;
    const double ends = 4 * (0.1 + 0.2) + 0.05 + gather + reduce;
    EXPECT_NEAR(Seconds(layer, step), ends, kEvents);
  }
}

TEST(Training, WithoutComputeTheCollectivesAreTheStep) {
  const LayerPrograms layer = MakeLayer({1, 4});
  TrainingStep step;
  step.layers = 5;
  const double gather = Simulate(layer.all_gather, Toy(), {}).seconds;
  const double reduce = Simulate(layer.reduce_scatter[0], Toy(), {}).seconds;
  const double seconds = Seconds(layer, step);
  // Reduce-scatters run beside all-gathers at best, one after the other at worst.
  EXPECT_GT(seconds, 10 * gather);
  EXPECT_LT(seconds, 10 * gather + 5 * reduce + 5 * kEvents);
}

// An all-gather's casts follow the copy-in stream, which holds no earlier all-gather.
TEST(Training, ShardsAreCastBesideTheAllGatherBefore) {
  LayerPrograms layer = MakeLayer({1, 2});
  AllGatherOptions options;
  options.first_cast_bytes = int64_t{1} << 23;
  layer.all_gather = AllGathers({1, 2}, options, DType::kF32);
  TrainingStep step;
  step.layers = 5;
  step.backward_s = 0.1;  // hides the collectives of the backward, but the last
  const double gather = Simulate(layer.all_gather, Toy(), {}).seconds;
  const double reduce = Simulate(layer.reduce_scatter[0], Toy(), {}).seconds;
  EXPECT_LT(Seconds(layer, step), 5 * (gather + step.backward_s) + reduce);
}

TEST(Training, SlotReuseCopiesOnTheStreamOfCompute) {
  for (const Topology topology : {Topology{1, 4}, {2, 2}}) {
    const LayerPrograms layer = MakeLayer(topology, Mode::kSlotReuse);
    TrainingStep step;
    step.layers = 4;
    step.forward_s = 0.1;
    step.backward_s = 0.2;
    const double in_place = Seconds(MakeLayer(topology), step);
    step.mode = Mode::kSlotReuse;
    // Read and written once, beside a collective that takes some of the memory's rate.
    const double copies = 4 * 2 * static_cast<double>(layer.gradient_bytes) / 1000e9;
    EXPECT_GT(Seconds(layer, step), in_place + copies - kEvents);
    EXPECT_LT(Seconds(layer, step), in_place + 1.5 * copies + kEvents);
  }
}

// It may start before the reduce-scatter that FSDP2's stream waits for has ended. Where the rails
// are what limits the step, it takes them from that reduce-scatter, for which compute waits.
TEST(Training, TheEarlyAllGatherGainsOrLoses) {
  const auto gain = [](const Topology& topology, double backward_s) {
    const LayerPrograms layer = MakeLayer(topology);
    TrainingStep step;
    step.layers = 6;
    step.backward_s = backward_s;
    const double early = Seconds(layer, step);
    step.early_all_gather = false;
    return Seconds(layer, step) - early;
  };
  EXPECT_GT(gain({1, 4}, 0.2e-3), 0);
  EXPECT_LT(gain({4, 2}, 1.5e-3), 0);
  EXPECT_NEAR(gain({1, 4}, 0.1), 0, 1e-6);
  EXPECT_NEAR(gain({4, 2}, 0.1), 0, 1e-6);
}

// A refresh reads the shards and the own part of the landing; nothing crosses the links.
TEST(Training, ARefreshTakesTheMemoryAlone) {
  AllGatherOptions options;
  options.refresh = true;
  for (const DType shards : {DType::kBF16, DType::kF32}) {
    const auto result = Simulate(AllGathers({1, 4}, options, shards), Toy(), {});
    const GroupLayout layer = testing::Layer({1, 4});
    double bytes = 0;
    for (const ParamLayout& param : layer.params()) {
      bytes += static_cast<double>(param.shard_elems * static_cast<int64_t>(2 + ItemSize(shards)));
    }
    bool memory = false;
    for (const SimulatedResource& resource : result.resources) {
      EXPECT_EQ(resource.name.find("NVLink"), std::string::npos) << resource.name;
      memory |= resource.name == "memory" && std::abs(resource.bytes - bytes) < 1;
    }
    EXPECT_TRUE(memory);
    EXPECT_GT(result.seconds, bytes / 400e9);  // the rate of a cast on all multiprocessors
    EXPECT_LT(result.seconds, bytes / 400e9 + kEvents);
  }
}

// On a machine whose reduce-scatters wait for links, not for sums.
double SavedByKeeping(const LayerPrograms& layer, TrainingStep step) {
  MachineModel machine = Toy();
  machine.sum_curves = {{1, {{8, 400}}}, {2, {{4, 1000}}}};
  const double gathered = Seconds(layer, step, machine);
  step.keep_landings = true;
  return gathered - Seconds(layer, step, machine);
}

// The slots hold the last layers when the backward begins. Of their all-gathers all but the first
// run beside reduce-scatters.
TEST(Training, KeptLandingsSaveAllGathers) {
  LayerPrograms layer = MakeLayer({1, 4});
  TrainingStep step;
  step.layers = 5;
  EXPECT_EQ(SavedByKeeping(layer, step), 0);  // no refresh: not kept
  AllGatherOptions options;
  options.refresh = true;
  layer.refresh = AllGathers({1, 4}, options);
  const double gather = Simulate(layer.all_gather, Toy(), {}).seconds;
  const double refresh = Simulate(layer.refresh, Toy(), {}).seconds;
  double before = 0;
  for (const int slots : {2, 3, 5}) {
    step.landing_slots = slots;
    const double saved = SavedByKeeping(layer, step);
    EXPECT_GT(saved, before + 0.1 * gather);
    EXPECT_LT(saved, slots * (gather - refresh) + kEvents);
    before = saved;
  }
  step.landing_slots = 6;  // no layer is left for it
  EXPECT_EQ(SavedByKeeping(layer, step), before);
}

TEST(Training, ComputeThatNeedsTheMemoryIsSlowedDown) {
  const LayerPrograms layer = MakeLayer({1, 4});
  TrainingStep step;
  step.layers = 3;
  step.forward_s = 0.1;
  step.backward_s = 0.2;
  const double untouched = Seconds(layer, step);
  double before = untouched;
  for (const double traffic : {900.0, 1000.0}) {
    step.compute_gb_per_s = traffic;
    const double seconds = Seconds(layer, step);
    EXPECT_GT(seconds, before);
    before = seconds;
  }
  step.compute_gb_per_s = 100;  // the rest of the memory is enough for the collectives
  EXPECT_NEAR(Seconds(layer, step), untouched, kEvents);
}

TEST(Training, RefusesAStepWithoutLayersOrSlots) {
  TrainingStep step;
  step.layers = 0;
  EXPECT_THROW(Seconds(MakeLayer({1, 2}), step), Error);
  step.layers = 1;
  step.landing_slots = 1;
  EXPECT_THROW(Seconds(MakeLayer({1, 2}), step), Error);
}

// Times are rounded to more than a flow's last byte takes.
TEST(Training, AStepOfHoursEnds) {
  TrainingStep step;
  step.layers = 40;
  step.forward_s = 1000;
  step.backward_s = 1000;
  const double compute = 40 * (step.forward_s + step.backward_s);
  EXPECT_NEAR(Seconds(MakeLayer({1, 2}), step), compute, 1);
}

}  // namespace
}  // namespace tide
