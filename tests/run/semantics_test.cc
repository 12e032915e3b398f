// What the numbers mean: one result whatever the chunks, contexts, passes, slots, round widths and
// modes; exact integer sums; NaN and infinities; the error against fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "testing/cases.h"
#include "testing/checks.h"
#include "testing/ranks.h"
#include "tide/communicator.h"

namespace tide {
namespace {

using testing::Pointers;
using testing::RunCommunicators;
using testing::ValueAt;

using Buffers = std::vector<std::vector<char>>;  // by parameter

const std::vector<ParamShape>& Shapes() {
  static const std::vector<ParamShape> shapes = {{"weight", 37, 24, DType::kBF16},
                                                 {"bias", 5, 1, DType::kBF16},
                                                 {"head", 11, 30, DType::kBF16}};
  return shapes;
}

class Semantics : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  const Topology topology_{GetParam().first, GetParam().second};
  const GroupLayout layout_{"g", Shapes(), topology_.Ranks()};

  std::vector<CommunicatorOptions> BothPlacements() const {
    std::vector<CommunicatorOptions> both(2);
    for (CommunicatorOptions& options : both) options.nodes = topology_.nodes;
    both[1].reduce_scatter.placement = Placement::kLatinSquare;
    return both;
  }

  // The outputs of all ranks, as fp32; `gradients` by rank.
  std::vector<std::vector<float>> Reduce(const CommunicatorOptions& options, DType dtype,
                                         const std::vector<Buffers>& gradients, float scale) const {
    std::vector<std::vector<float>> outputs(gradients.size());
    RunCommunicators(topology_.Ranks(), options, [&](Communicator& comm) {
      const auto rank = static_cast<size_t>(comm.rank());
      const int group = comm.RegisterGroup("g", Shapes());
      std::vector<int> params(Shapes().size());
      std::iota(params.begin(), params.end(), 0);
      int64_t elems = 0;
      for (const ParamLayout& param : layout_.params()) elems += param.shard_elems;
      outputs[rank].resize(static_cast<size_t>(elems));
      comm.ReduceScatter({group, params, Pointers(gradients[rank]),
                          std::vector<DType>(params.size(), dtype), outputs[rank].data(),
                          DType::kF32, scale, false});
    });
    return outputs;
  }

  // Calls check(output, values of all ranks) for every element that is no padding.
  template <typename Check>
  void ForEachElement(DType dtype, const std::vector<Buffers>& gradients,
                      const std::vector<std::vector<float>>& outputs, const Check& check) const {
    for (int rank = 0; rank < topology_.Ranks(); ++rank) {
      int64_t first = 0;  // of the parameter in the output
      for (size_t p = 0; p < Shapes().size(); ++p) {
        const int64_t shard = layout_.params()[p].shard_elems;
        for (int64_t i = 0; i < layout_.LiveElems(static_cast<int>(p), rank); ++i) {
          std::vector<float> values;
          for (const Buffers& theirs : gradients) {
            values.push_back(ValueAt(theirs[p], dtype, rank * shard + i));
          }
          check(outputs[static_cast<size_t>(rank)][static_cast<size_t>(first + i)], values);
        }
        first += shard;
      }
    }
  }

  // value(random) for every element of every rank's gradients.
  template <typename Value>
  std::vector<Buffers> Make(DType dtype, const Value& value) const {
    std::vector<Buffers> all;
    std::mt19937 random(11);
    for (int rank = 0; rank < topology_.Ranks(); ++rank) {
      Buffers& gradients = all.emplace_back();
      for (const ParamShape& shape : Shapes()) {
        const int64_t elems = shape.rows * shape.row_elems;
        auto& bytes = gradients.emplace_back(static_cast<size_t>(elems) * ItemSize(dtype));
        for (int64_t i = 0; i < elems; ++i) testing::Store(&bytes, dtype, i, value(random));
      }
    }
    return all;
  }
  std::vector<Buffers> Normal(DType dtype) const {
    return Make(dtype,
                [](std::mt19937& random) { return std::normal_distribution<float>()(random); });
  }
};

// FNV-1a over the bytes of all outputs.
uint64_t Hash(const std::vector<std::vector<float>>& outputs) {
  uint64_t hash = 14695981039346656037U;
  for (const auto& output : outputs) {
    for (const float value : output) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      hash = (hash ^ bits) * 1099511628211U;
    }
  }
  return hash;
}

// One option at a time, then all of them at other values.
std::vector<CommunicatorOptions> Variants(const CommunicatorOptions& base) {
  std::vector<CommunicatorOptions> all;
  const auto add = [&](const auto& change) {
    all.push_back(base);
    all.back().reduce_scatter.min_stripe_bytes = 64;
    change(&all.back().reduce_scatter);
  };
  for (const int contexts : {1, 2, 4}) {
    add([&](ReduceScatterOptions* reduce) { reduce->contexts = contexts; });
  }
  for (const int passes : {1, 2, 3, 4}) {
    if (base.nodes == 1 && passes > 1) continue;
    add([&](ReduceScatterOptions* reduce) { reduce->passes = passes; });
    add([&](ReduceScatterOptions* reduce) {
      *reduce = {
          reduce->placement,     Mode::kSlotReuse, 0, passes, passes, 1 + passes % 2, passes, 64,
          {128 * passes, passes}};
    });
  }
  for (const int slots : {1, 2, 3}) {
    for (const int64_t bytes : {64, 192, 1024}) {
      add([&](ReduceScatterOptions* reduce) { reduce->staging = {bytes, slots}; });
    }
  }
  for (const int width : {1, 2, 3, 4}) {
    for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
      add([&](ReduceScatterOptions* reduce) {
        reduce->round_width = width;
        reduce->mode = mode;
      });
    }
  }
  return all;
}

TEST_P(Semantics, OneHashOverAllOptions) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const auto gradients = Normal(dtype);
    for (const CommunicatorOptions& base : BothPlacements()) {
      const uint64_t expected = Hash(Reduce(base, dtype, gradients, 1.0F / 3));
      int variant = 0;
      for (const CommunicatorOptions& options : Variants(base)) {
        EXPECT_EQ(Hash(Reduce(options, dtype, gradients, 1.0F / 3)), expected)
            << Name(dtype) << ", " << Name(base.reduce_scatter.placement) << ", variant "
            << variant;
        ++variant;
      }
    }
  }
}

// Sums of small integers are exact in fp32, whatever the order; so is a power of two as divisor.
TEST_P(Semantics, IntegerSumsAreExact) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const auto gradients = Make(dtype, [](std::mt19937& random) {
      return static_cast<float>(static_cast<int>(random() % 201) - 100);
    });
    for (const CommunicatorOptions& options : BothPlacements()) {
      for (const float scale : {1.0F, 0.125F}) {
        const auto outputs = Reduce(options, dtype, gradients, scale);
        ForEachElement(dtype, gradients, outputs,
                       [&](float output, const std::vector<float>& values) {
                         int sum = 0;
                         for (const float value : values) sum += static_cast<int>(value);
                         ASSERT_EQ(output, static_cast<float>(sum) * scale);
                       });
      }
    }
  }
}

TEST_P(Semantics, NanAndInfinitiesHaveTheRightClass) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    auto gradients = Normal(dtype);
    std::mt19937 random(13);
    for (Buffers& theirs : gradients) {
      for (auto& bytes : theirs) {
        const auto elems = static_cast<int64_t>(bytes.size() / ItemSize(dtype));
        for (int64_t i = 0; i < elems; ++i) {
          const auto draw = random() % 32;
          if (draw < 4) testing::Store(&bytes, dtype, i, draw < 1 ? kNan : draw < 2 ? -kInf : kInf);
        }
      }
    }
    for (const CommunicatorOptions& options : BothPlacements()) {
      const auto outputs = Reduce(options, dtype, gradients, 0.5F);
      ForEachElement(dtype, gradients, outputs, [](float output, const std::vector<float>& values) {
        double sum = 0;
        for (const float value : values) sum += value;
        ASSERT_EQ(std::isnan(output), std::isnan(sum));
        ASSERT_EQ(std::isinf(output), std::isinf(sum));
        if (std::isinf(sum)) {
          ASSERT_EQ(std::signbit(output), std::signbit(sum));
        }
      });
    }
  }
}

TEST_P(Semantics, ErrorAgainstDoubleIsSmall) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const auto gradients = Normal(dtype);
    for (const CommunicatorOptions& options : BothPlacements()) {
      const float scale = 1.0F / static_cast<float>(topology_.Ranks());
      double largest = 1;
      double error = 0;
      const auto outputs = Reduce(options, dtype, gradients, scale);
      ForEachElement(dtype, gradients, outputs,
                     [&](float output, const std::vector<float>& values) {
                       const double sum = std::accumulate(values.begin(), values.end(), 0.0);
                       largest = std::max(largest, std::abs(sum * scale));
                       error = std::max(error, std::abs(output - sum * scale));
                     });
      EXPECT_LE(error, 1e-5 * largest) << Name(dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Semantics,
                         ::testing::Values(std::pair(1, 1), std::pair(1, 3), std::pair(2, 1),
                                           std::pair(2, 2), std::pair(3, 2), std::pair(2, 4),
                                           std::pair(5, 1), std::pair(9, 1)),
                         [](const auto& shape) {
                           return std::to_string(shape.param.first) + "x" +
                                  std::to_string(shape.param.second);
                         });

}  // namespace
}  // namespace tide
