// Groups and options for the verifier's tests.
#ifndef TIDE_TESTS_VERIFY_SETUPS_H_
#define TIDE_TESTS_VERIFY_SETUPS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "testing/cases.h"
#include "tide/verify.h"

namespace tide::testing {

// Every parameter takes part; shards and gradients in `shard` and `grad`, gathered as bf16.
inline VerifyGroup MakeGroup(const std::string& name, const ShapeCase& shape, int ranks,
                             DType shard, DType grad) {
  VerifyGroup group{GroupLayout(name, MakeShapes(shape, DType::kBF16), ranks), {}, {}};
  const size_t params = group.layout.params().size();
  group.shard_dtypes.assign(params, shard);
  for (size_t p = 0; p < params; ++p) group.reduce.params.push_back(static_cast<int>(p));
  group.reduce.grad_dtypes.assign(params, grad);
  return group;
}

// Two groups of different size, large enough that no rank and no sub-slice is empty, the last rank
// padded. They share one staging region of `slots` slots; slot_bytes 0: each
// call is one chunk.
inline VerifySetup MakeSetup(const Topology& topology, DType shard, DType grad, int64_t slot_bytes,
                             int slots) {
  VerifySetup setup;
  setup.topology = topology;
  const int ranks = topology.Ranks();
  setup.groups.push_back(
      MakeGroup("layer", {"layer", {2 * ranks - 1, ranks, 3 * ranks}, 128}, ranks, shard, grad));
  setup.groups.push_back(
      MakeGroup("head", {"head", {5 * ranks - 1, 3 * ranks}, 64}, ranks, shard, grad));
  for (const VerifyGroup& group : setup.groups) {
    const int64_t whole = StagedBytes(group.layout, group.reduce);
    setup.reduce_scatter.staging.slot_bytes =
        std::max({setup.reduce_scatter.staging.slot_bytes, slot_bytes > 0 ? slot_bytes : whole,
                  kStagingAlignment * topology.local_ranks});
  }
  setup.reduce_scatter.staging.slots = slots;
  return setup;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_VERIFY_SETUPS_H_
