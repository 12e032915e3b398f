// Planners: pure arithmetic from (layout, participants, topology, options) to the program of one
// rank.
//
// No I/O, no clock, no device. Equal arguments give equal programs on all ranks up to `rank`.
#ifndef TIDE_PLAN_H_
#define TIDE_PLAN_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tide/layout.h"
#include "tide/program.h"

namespace tide {

// Staging slots and pieces start on this boundary: one cache line, and the widest vector.
inline constexpr int64_t kStagingAlignment = 64;

struct StagingOptions {
  // Bytes of one staging slot, a constant of the region. At most this much of a block is staged at
  // a time.
  int64_t slot_bytes = 0;
  // Slots for each local rank that fills; chunk c of a call uses slot c mod slots.
  int slots = 1;
  // The last chunks of a block halve down to this many bytes, so that little is left to sum when
  // the last one has arrived. 0: all chunks but the last fill their slots.
  int64_t taper_bytes = 0;
  // Upper bound of one slot of every local rank together, where `slot_bytes` is one; 0: none.
  int64_t node_bytes = 0;
};

// Constants of the all-gather lane: equal for all groups and ranks.
struct AllGatherOptions {
  // Heads of all rounds of a call together, bytes; the receiver confirms a round when its heads
  // have arrived (paper, section 3.1). 0: no heads, a round is confirmed when it has arrived.
  int64_t head_bytes = int64_t{8} << 20;
  // A transfer is striped over as many contexts of the rail as get at least `min_stripe_bytes`
  // each.
  int contexts = 4;
  int64_t min_stripe_bytes = int64_t{256} << 10;
  // The shards lie packed in one symmetric region, so that the rail can read them in place.
  // Otherwise they are copied or cast into the first slot of the receive stage (M > 1, L > 1). For
  // planning alone: a communicator has no such region, and refuses it.
  bool resident = false;
  // One node: a cast runs beside the transfers. Its first part makes this many bytes, every further
  // one twice as many as the part before; each is sent when it is cast. 0: cast first, then send.
  int64_t first_cast_bytes = 0;
  // One node: the landing holds what the group's last all-gather has brought, on all ranks. Each of
  // them compares its shards with its part there, and writes to the landings what differs.
  bool refresh = false;
};

// Where partials of other nodes land (docs/design.md).
enum class Placement : uint8_t {
  kDirect,       // owner j reduces the slice of rank j of the destination node
  kLatinSquare,  // paper, section 4.2: one switch reduction adds up to L nodes
};

// Where gradients lie while they are reduced, and so how deep the outbox is (paper, section 5.3).
enum class Mode : uint8_t { kInPlace, kSlotReuse };

// "direct", "latin_square"; "in_place", "slot_reuse". Throw Error(kInvalidArgument) for other
// words.
Placement ParsePlacement(const std::string& word);
Mode ParseMode(const std::string& word);
const char* Name(Placement placement);
const char* Name(Mode mode);

// Every pass repeats all rounds, for blocks that are smaller in proportion.
inline constexpr int kMostPasses = 64;

// Constants of the reduce-scatter lane; passes alone may differ from group to group.
struct ReduceScatterOptions {
  Placement placement = Placement::kDirect;
  Mode mode = Mode::kInPlace;
  int wave_width = 0;   // contributors a wave at most; 0: L, or 8 where L = 1
  int round_width = 2;  // k: transfers under way together
  int passes = 1;       // n_part: parts of every sub-slice, one after the other
  int generations = 0;  // n_par, 1 or 2; 0: 1 for a single wave in a single pass, else 2
  int contexts = 4;     // as in AllGatherOptions
  int64_t min_stripe_bytes = int64_t{256} << 10;
  StagingOptions staging;
  // Called now and then while a program is planned, which takes seconds with tiny staging slots;
  // may throw to give up.
  std::function<void()> check_interrupt = [] {};
};

// What one reduce-scatter call reduces: parameter indices in order, the gradients' dtypes (same
// length).
struct ReduceScatterSpec {
  std::vector<int> params;
  std::vector<DType> grad_dtypes;
  DType output_dtype = DType::kF32;
  bool accumulate = false;
  // Which outbox the call uses: the lane's call count mod 2.
  int bank = 0;
};

// All-gather (paper, section 3). One node: entry fence, one batch of multicasts, completion fence;
// a shard whose dtype differs from the gather dtype is cast into this rank's part of its own
// landing first. Several nodes: recursive doubling over the rails, slots multicast on arrival. One
// rank a node: doubling from landing to landing. shard_dtypes: one a parameter. Throws
// Error(kInvalidArgument).
Program PlanAllGather(const GroupLayout& layout, const std::vector<DType>& shard_dtypes,
                      const Topology& topology, int rank, const AllGatherOptions& options = {});

// Reduce-scatter (paper, section 4). Level 1: every rank pushes each sibling's slice into that
// sibling's staging; the owner sums in local-rank order, own contribution last and read where
// autograd left it. Level 2: node partials travel by rail and land in waves. One node: the sum is
// the output. Throws Error(kInvalidArgument) for an impossible plan, naming the rule.
Program PlanReduceScatter(const GroupLayout& layout, const ReduceScatterSpec& spec,
                          const Topology& topology, int rank, const ReduceScatterOptions& options);

// Every rank has entered.
Program PlanBarrier(const Topology& topology, int rank);

// Bytes of a rank's temporary regions that a program needs, largest buffer by kind and index
// (paper, section 5.4). Regions of a lane are the maximum over its groups.
struct RegionBytes {
  int64_t stage = 0;    // all-gather
  int64_t staging = 0;  // (L - 1) peers * n_stg slots
  int64_t outbox = 0;   // each of two banks
  int64_t spare = 0;    // each of two banks
  int64_t inbox = 0;    // each generation
  int generations = 0;
  int64_t accumulator = 0;

  int64_t reduce_scatter() const {
    return staging + 2 * (outbox + spare) + generations * inbox + accumulator;
  }
};
RegionBytes AllGatherRegions(const GroupLayout& layout, const Topology& topology,
                             const AllGatherOptions& options);
RegionBytes ReduceScatterRegions(const GroupLayout& layout, const ReduceScatterSpec& spec,
                                 const Topology& topology, const ReduceScatterOptions& options);

// Bytes that one peer stages for one owner in a whole call: the slot size that needs one chunk
// only.
int64_t StagedBytes(const GroupLayout& layout, const ReduceScatterSpec& spec);

// Bytes of a slot for calls that stage at most `staged_bytes`: as much, but no more than the bounds
// (of slot_bytes 0: none), with more than two slots no more than twice as much in all, and a cache
// line for each row of a block.
int64_t StagingSlotBytes(int64_t staged_bytes, const StagingOptions& bounds,
                         const Topology& topology, int round_width);

// Bytes of the staging region of one rank (paper, equation 10 with M = 1: (L-1) peers, n_stg
// slots).
int64_t StagingRegionBytes(const Topology& topology, const StagingOptions& staging);

}  // namespace tide

#endif  // TIDE_PLAN_H_
