// How long it takes to plan one rank's program of a Llama-like group of 30 parameters.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "tide/plan.h"

namespace tide {
namespace {

GroupLayout Layer(int ranks) {
  std::vector<ParamShape> shapes;
  for (int p = 0; p < 30; ++p) {
    shapes.push_back({"p" + std::to_string(p), p % 5 == 0 ? 1024 : 8192, 8192, DType::kBF16});
  }
  return {"layer", shapes, ranks};
}

void PlanOneAllGather(benchmark::State& state) {
  const Topology topology{static_cast<int>(state.range(0)), 8};
  const GroupLayout layout = Layer(topology.Ranks());
  const std::vector<DType> dtypes(layout.params().size(), DType::kBF16);
  for (auto _ : state) {
    benchmark::DoNotOptimize(PlanAllGather(layout, dtypes, topology, 0));
  }
}
BENCHMARK(PlanOneAllGather)->Arg(1)->Arg(64)->Arg(1024)->Unit(benchmark::kMillisecond);

void PlanOneReduceScatter(benchmark::State& state) {
  const Topology topology{static_cast<int>(state.range(0)), 8};
  const GroupLayout layout = Layer(topology.Ranks());
  ReduceScatterSpec spec;
  for (size_t p = 0; p < layout.params().size(); ++p) spec.params.push_back(static_cast<int>(p));
  spec.grad_dtypes.assign(layout.params().size(), DType::kBF16);
  ReduceScatterOptions options;
  options.placement = state.range(1) == 0 ? Placement::kDirect : Placement::kLatinSquare;
  options.round_width = 4;
  options.staging.slot_bytes = StagedBytes(layout, spec) + (1 << 20);
  options.staging.slots = 2;
  for (auto _ : state) {
    benchmark::DoNotOptimize(PlanReduceScatter(layout, spec, topology, 0, options));
  }
}
BENCHMARK(PlanOneReduceScatter)
    ->ArgsProduct({{1, 64, 1024}, {0, 1}})
    ->ArgNames({"nodes", "latin"})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tide
