// The scenarios that faults and delays are injected into: topologies, both collectives, both
// placements and modes, passes, round widths and chunks.
#ifndef TIDE_TESTS_TESTING_SCENARIOS_H_
#define TIDE_TESTS_TESTING_SCENARIOS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "testing/faults.h"

namespace tide::testing {

inline ReduceScatterOptions Reduce(Placement placement, Mode mode, int passes, int round_width,
                                   StagingOptions staging, int generations = 0) {
  ReduceScatterOptions options;
  options.generations = generations;
  options.placement = placement;
  options.mode = mode;
  options.passes = passes;
  options.round_width = round_width;
  options.staging = staging;
  return options;
}

inline std::vector<Scenario> Scenarios() {
  constexpr auto kDirect = Placement::kDirect;
  constexpr auto kLatin = Placement::kLatinSquare;
  constexpr auto kWhole = Mode::kInPlace;
  constexpr auto kPartial = Mode::kSlotReuse;
  return {
      {"gather_1x4", {1, 4}},
      {"gather_1x4_cast", {1, 4}, false, DType::kF32},
      {"gather_2x1", {2, 1}},
      {"gather_2x2", {2, 2}},
      {"gather_2x2_shared", {2, 2}, false, DType::kBF16, {}, SegmentKind::kNodeShared},
      {"gather_3x2_cast", {3, 2}, false, DType::kF32},
      {"gather_5x1", {5, 1}},
      {"gather_2x4", {2, 4}},
      {"gather_9x1_cast", {9, 1}, false, DType::kF32},
      {"reduce_1x4", {1, 4}, true, DType::kBF16, Reduce(kDirect, kWhole, 1, 2, {256, 2})},
      {"reduce_2x1", {2, 1}, true, DType::kF32, Reduce(kDirect, kWhole, 1, 2, {0, 1})},
      {"reduce_2x2_direct", {2, 2}, true, DType::kBF16, Reduce(kDirect, kWhole, 1, 2, {0, 1})},
      {"reduce_2x2_latin", {2, 2}, true, DType::kF32, Reduce(kLatin, kPartial, 2, 1, {256, 1})},
      {"reduce_3x2_direct", {3, 2}, true, DType::kF32, Reduce(kDirect, kPartial, 2, 1, {0, 2})},
      {"reduce_3x2_latin", {3, 2}, true, DType::kBF16, Reduce(kLatin, kWhole, 1, 2, {0, 1}, 1)},
      {"reduce_5x1", {5, 1}, true, DType::kBF16, Reduce(kDirect, kPartial, 1, 1, {0, 1})},
      {"reduce_2x4_latin", {2, 4}, true, DType::kBF16, Reduce(kLatin, kWhole, 1, 2, {0, 1})},
      {"reduce_9x1", {9, 1}, true, DType::kF32, Reduce(kDirect, kPartial, 1, 2, {0, 1})},
  };
}

inline Scenario ScenarioOf(const std::string& name) {
  const std::vector<Scenario> all = Scenarios();
  return *std::find_if(all.begin(), all.end(), [&](const Scenario& s) { return s.name == name; });
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_SCENARIOS_H_
