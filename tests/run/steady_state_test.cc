// A call that has been made before takes no memory.
#include <gtest/gtest.h>

#include <vector>

#include "testing/checks.h"
#include "testing/count_allocations.h"
#include "testing/ranks.h"
#include "tide/communicator.h"

namespace tide {
namespace {

using testing::allocations;

void CheckNoAllocation(const Topology& topology, Placement placement) {
  SCOPED_TRACE(::testing::Message()
               << topology.nodes << " x " << topology.local_ranks << ", " << Name(placement));
  const std::vector<ParamShape> shapes = {{"weight", 37, 24, DType::kBF16},
                                          {"bias", 5, 1, DType::kBF16}};
  const std::vector<DType> dtypes(shapes.size(), DType::kBF16);
  CommunicatorOptions options;
  options.nodes = topology.nodes;
  options.reduce_scatter.placement = placement;
  testing::RunCommunicators(topology.Ranks(), options, [&](Communicator& comm) {
    const int group = comm.RegisterGroup("g", shapes);
    const GroupLayout& layout = comm.layout(group);
    const SegmentView landing = testing::AddLanding(comm, group, SegmentKind::kNodeShared);
    const auto gradients = testing::Gradients(layout, dtypes, comm.rank());
    std::vector<float> output(
        static_cast<size_t>(layout.params()[0].shard_elems + layout.params()[1].shard_elems));
    const AllGatherCall gather{group, testing::Pointers(gradients), dtypes, {landing.id, 0}};
    const ReduceScatterCall reduce{.group = group,
                                   .params = {0, 1},
                                   .gradients = testing::Pointers(gradients),
                                   .grad_dtypes = dtypes,
                                   .output = output.data()};
    // Two calls, because outboxes alternate.
    const auto two_calls = [&] {
      const int64_t before = allocations;
      for (int i = 0; i < 2; ++i) {
        comm.AllGather(gather);
        comm.ReduceScatter(reduce);
      }
      return allocations - before;
    };
    EXPECT_GT(two_calls(), 0) << "the first calls plan: is anything counted?";
    EXPECT_EQ(two_calls(), 0) << "rank " << comm.rank();
  });
}

TEST(SteadyState, CallsTakeNoMemory) {
  for (const Topology& topology :
       {Topology{1, 1}, Topology{1, 3}, Topology{2, 2}, Topology{3, 1}}) {
    for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
      CheckNoAllocation(topology, placement);
    }
  }
}

}  // namespace
}  // namespace tide
