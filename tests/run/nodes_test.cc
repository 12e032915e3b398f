// Both collectives over several virtual nodes, ranks as threads, against a scalar reference.
#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

#include "testing/cases.h"
#include "testing/checks.h"
#include "testing/ranks.h"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide {
namespace {

using testing::Alternate;
using testing::CheckAllGather;
using testing::CheckReduceScatter;
using testing::RunCommunicators;
using testing::ShapeCase;

CommunicatorOptions Nodes(int nodes) {
  CommunicatorOptions options;
  options.nodes = nodes;
  options.timeout = std::chrono::seconds(30);
  // Small enough that tiny transfers are striped and have heads.
  options.all_gather.head_bytes = 512;
  options.all_gather.min_stripe_bytes = 128;
  options.reduce_scatter.min_stripe_bytes = 128;
  return options;
}

const std::vector<std::pair<int, int>>& SmallTopologies() {
  static const std::vector<std::pair<int, int>> topologies = {
      {2, 1}, {3, 1}, {5, 1}, {9, 1}, {2, 2}, {3, 2}, {2, 3}, {5, 2}, {2, 4}, {4, 2}, {3, 4}};
  return topologies;
}

TEST(AllGather, ByteExactOverNodes) {
  for (const auto& [nodes, locals] : SmallTopologies()) {
    SCOPED_TRACE(::testing::Message() << nodes << " x " << locals);
    RunCommunicators(nodes * locals, Nodes(nodes), [](Communicator& comm) {
      for (const ShapeCase& shape : testing::ShapeCases()) {
        for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF32}) {
          CheckAllGather(comm, shape, dtype);
        }
      }
    });
  }
}

void CheckReductions(int nodes, int locals, CommunicatorOptions options) {
  RunCommunicators(nodes * locals, options, [&](Communicator& comm) {
    for (const ShapeCase& shape : testing::ShapeCases()) {
      const size_t count = shape.rows.size();
      const std::vector<DType> bf16(count, DType::kBF16);
      CheckReduceScatter(comm, shape, {bf16, 0.25F, false}, options.reduce_scatter);
      CheckReduceScatter(comm, shape, {std::vector<DType>(count, DType::kF32), 1.0F / 3, true},
                         options.reduce_scatter);
      CheckReduceScatter(comm, shape, {Alternate(count), 1.0F, false}, options.reduce_scatter);
    }
  });
}

TEST(ReduceScatter, BitwiseOverNodes) {
  for (const auto& [nodes, locals] : SmallTopologies()) {
    for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
      for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
        SCOPED_TRACE(::testing::Message()
                     << nodes << " x " << locals << " " << Name(placement) << " " << Name(mode));
        CommunicatorOptions options = Nodes(nodes);
        options.reduce_scatter.placement = placement;
        options.reduce_scatter.mode = mode;
        CheckReductions(nodes, locals, options);
      }
    }
  }
}

}  // namespace
}  // namespace tide
