// Packed shards of the all-gather: slot i holds all shards of one rank of the rail, one after the
// other, and is scattered into the parameter-major landings (paper, section 3.1, figure 5b).
#ifndef TIDE_PLAN_SHARD_SLOTS_H_
#define TIDE_PLAN_SHARD_SLOTS_H_

#include <cstdint>
#include <vector>

#include "plan/builder.h"
#include "plan/striping.h"
#include "tide/layout.h"
#include "tide/program.h"

namespace tide::internal {

// Runs of at least this many slots become one pitched copy a parameter.
inline constexpr int kMinMergedSlots = 4;

// Bytes of one slot: S, each shard aligned to kStagingAlignment.
int64_t SlotBytes(const GroupLayout& layout);
// (M - 1) slots, or M when the own shards have no resident region and go through the first.
int64_t StageBytes(const GroupLayout& layout, const Topology& topology, bool resident);

// Where the shards of `count` nodes, from node `first` (modulo M) on, lie in a landing of one rank
// a node: the same offsets on the sender and on the receiver.
std::vector<Run> LandingRuns(const GroupLayout& layout, int nodes, int landing, int first,
                             int count);

class ShardSlots {
 public:
  // Adds the stage, and the resident region if there is one, to the program.
  ShardSlots(Builder* builder, const GroupLayout& layout, int landing, bool resident);

  // The own shard of parameter p, packed.
  Ref Own(int param) const { return At(0, offsets_[static_cast<size_t>(param)]); }
  // The sender's slots [src, src + count), which become the receiver's from slot `dst` on.
  std::vector<Run> Runs(int src, int dst, int count) const;
  // Multicasts slots [first, first + count) into their places.
  void Scatter(int queue, int first, int count);

 private:
  Ref At(int slot, int64_t offset) const;
  void AddPieces(int slot, int node, int count, std::vector<Piece>* pieces) const;

  Builder& builder_;
  const GroupLayout& layout_;
  const int landing_;
  const int64_t slot_bytes_;
  std::vector<int64_t> offsets_;  // of each parameter's shard in a slot
  int resident_ = -1;
  int stage_ = 0;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_SHARD_SLOTS_H_
