// Random groups and options for collectives over nodes, the same on every rank from one seed.
#ifndef TIDE_TESTS_TESTING_RANDOM_CASE_H_
#define TIDE_TESTS_TESTING_RANDOM_CASE_H_

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tide/communicator.h"

namespace tide::testing {

inline constexpr int kMaxPasses = 4;
inline constexpr int kMaxRoundWidth = 4;

// One row of options: what a plan may vary without changing its results, the placement apart.
struct PlanChoice {
  int passes = 1;
  int round_width = 1;
  Mode mode = Mode::kInPlace;
  Placement placement = Placement::kDirect;
};

// Every pair of values of any two options is in one of the 16 rows.
inline PlanChoice CoveringRow(int row) {
  const int passes = row % kMaxPasses;
  const int width = row / kMaxPasses % kMaxRoundWidth;
  // Every value of `passes` and of `width` meets both modes and both placements.
  return {passes + 1, width + 1, (passes + width) % 2 == 0 ? Mode::kInPlace : Mode::kSlotReuse,
          (passes / 2 + width) % 2 == 0 ? Placement::kDirect : Placement::kLatinSquare};
}
inline constexpr int kCoveringRows = kMaxPasses * kMaxRoundWidth;

// Row of the full product, 64 of them.
inline PlanChoice ProductRow(int row) {
  const int rest = row / kCoveringRows;
  return {row % kMaxPasses + 1, row / kMaxPasses % kMaxRoundWidth + 1,
          rest % 2 == 0 ? Mode::kInPlace : Mode::kSlotReuse,
          rest / 2 % 2 == 0 ? Placement::kDirect : Placement::kLatinSquare};
}
inline constexpr int kProductRows = 4 * kCoveringRows;

struct RandomCase {
  std::vector<ParamShape> shapes;
  std::vector<DType> grad_dtypes;
  float scale = 1.0F;
  bool accumulate = false;
};

inline RandomCase MakeRandomCase(unsigned seed, int max_params) {
  std::mt19937 random(seed);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  RandomCase made;
  // Few parameters mostly, many sometimes.
  const int params = pick(0, 3) == 0 ? pick(1, max_params) : pick(1, std::min(max_params, 9));
  const bool mixed = pick(0, 2) == 0;
  const DType common = pick(0, 2) == 0 ? DType::kF32 : DType::kBF16;
  for (int p = 0; p < params; ++p) {
    const int64_t rows = pick(0, 5) == 0 ? pick(0, 3) : pick(1, 40);
    made.shapes.push_back({"p" + std::to_string(p), rows, pick(1, 7), DType::kBF16});
    made.grad_dtypes.push_back(!mixed ? common : pick(0, 1) == 0 ? DType::kF32 : DType::kBF16);
  }
  made.scale = pick(0, 1) == 0 ? 1.0F / 3 : 0.25F;
  made.accumulate = pick(0, 1) == 0;
  return made;
}

// Options of a communicator: the choice, and everything else at random.
inline CommunicatorOptions MakeOptions(const Topology& topology, const PlanChoice& choice,
                                       unsigned seed) {
  std::mt19937 random(seed + 1);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  CommunicatorOptions options;
  options.nodes = topology.nodes;
  options.multicast = true;  // where it is there
  options.timeout = std::chrono::seconds(60);
  options.all_gather.head_bytes = std::vector<int64_t>{0, 64, 4096}[random() % 3];
  options.all_gather.contexts = pick(1, 4);
  options.all_gather.min_stripe_bytes = 128;
  ReduceScatterOptions& reduce = options.reduce_scatter;
  reduce.placement = choice.placement;
  reduce.mode = choice.mode;
  reduce.round_width = choice.round_width;
  reduce.passes = topology.nodes > 1 ? choice.passes : 1;
  reduce.generations = pick(0, 2);
  reduce.contexts = pick(1, 4);
  reduce.min_stripe_bytes = 128;
  reduce.staging = {pick(0, 1) == 0 ? 0 : 64 * pick(1, 16), pick(1, 3)};
  // Divisors of L are allowed everywhere; direct takes any width.
  reduce.wave_width = pick(0, topology.local_ranks);
  if (choice.placement == Placement::kLatinSquare && reduce.wave_width > 0 &&
      topology.local_ranks % reduce.wave_width != 0) {
    reduce.wave_width = 0;
  }
  // What GPUs add: casts in parts, chunks that taper.
  options.all_gather.first_cast_bytes = 64 * pick(0, 2);
  reduce.staging.taper_bytes = 64 * pick(0, 2);
  return options;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_RANDOM_CASE_H_
