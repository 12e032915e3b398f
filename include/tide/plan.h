// Planners: pure arithmetic from (layout, participants, topology, options) to the program of one
// rank.
//
// No I/O, no clock, no device. Equal arguments give equal programs on all ranks up to `rank`.
#ifndef TIDE_PLAN_H_
#define TIDE_PLAN_H_

#include <cstdint>
#include <vector>

#include "tide/layout.h"
#include "tide/program.h"

namespace tide {

// Staging slots and pieces start on this boundary: one cache line, and the widest vector.
inline constexpr int64_t kStagingAlignment = 64;

struct StagingOptions {
  // Bytes of one staging slot, a constant of the region. At most this much of a call is staged at a
  // time.
  int64_t slot_bytes = 0;
  // Slots for each local rank that fills; chunk c uses slot c mod slots.
  int slots = 1;
};

// What one reduce-scatter call reduces: parameter indices in order, the gradients' dtypes (same
// length).
struct ReduceScatterSpec {
  std::vector<int> params;
  std::vector<DType> grad_dtypes;
  DType output_dtype = DType::kF32;
  bool accumulate = false;
};

// All-gather of one node (paper, section 3.1): entry fence, one batch of multicasts, completion
// fence. A shard whose dtype differs from the gather dtype is cast into this rank's part of its own
// landing first. shard_dtypes: one a parameter. Throws Error(kInvalidArgument), or kUnsupported for
// several nodes.
Program PlanAllGather(const GroupLayout& layout, const std::vector<DType>& shard_dtypes,
                      const Topology& topology, int rank);

// Reduce-scatter of one node (paper, section 4.1): every rank pushes each peer's slice into that
// peer's staging; the owner sums in local-rank order, own contribution last and read where autograd
// left it.
Program PlanReduceScatter(const GroupLayout& layout, const ReduceScatterSpec& spec,
                          const Topology& topology, int rank, const StagingOptions& staging);

// Every rank has entered.
Program PlanBarrier(const Topology& topology, int rank);

// Bytes that one peer stages for one owner in a whole call: the slot size that needs one chunk
// only.
int64_t StagedBytes(const GroupLayout& layout, const ReduceScatterSpec& spec);

// Bytes of the staging region of one rank (paper, equation 10 with M = 1: (L-1) peers, n_stg
// slots).
int64_t StagingRegionBytes(const Topology& topology, const StagingOptions& staging);

}  // namespace tide

#endif  // TIDE_PLAN_H_
