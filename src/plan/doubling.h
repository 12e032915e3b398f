// Bruck's recursive doubling over a rail (paper, section 3.1): rounds, transfers and their pieces.
//
// Slots are numbered from this node on: slot i holds the shard of node (n + i) mod M. In round d a
// node sends its first c_d slots to node n - 2^d, where they become slots 2^d, 2^d + 1, ...
#ifndef TIDE_PLAN_DOUBLING_H_
#define TIDE_PLAN_DOUBLING_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "plan/builder.h"
#include "plan/striping.h"
#include "tide/plan.h"

namespace tide::internal {

struct DoublingRound {
  int distance = 1;  // 2^d nodes
  int slots = 1;     // c_d = min(2^d, M - 2^d)
};

// ceil(log2 M) rounds; none for one node.
std::vector<DoublingRound> DoublingRounds(int nodes);

// The last round goes in at most four groups, so that the first slots can be used while the others
// still travel: a group is sent when the one before has come, since a rail runs puts and waits in
// the order of issue, and a wait behind the puts of all groups would see the first when the last
// has left. Slots [first, first + count).
struct SlotGroup {
  int first = 0;
  int count = 0;
};
inline constexpr int kMaxSlotGroups = 4;
static_assert(kMaxSlotGroups * kMaxContexts <= CounterIndices(CounterKind::kArrived));

// How the payload of slots [first, first + count) of `sender_node`, sent `distance` nodes down, is
// cut into contiguous runs. A rank asks for its own transfers and for those that reach it.
using Payload =
    std::function<std::vector<Run>(int sender_node, int distance, int first, int count)>;

class Doubling {
 public:
  // split_last: whether the last round is cut into groups.
  Doubling(Builder* builder, int queue, const AllGatherOptions& options, bool split_last,
           Payload payload);

  const std::vector<DoublingRound>& rounds() const { return rounds_; }
  // As many as have min_stripe_bytes: a group costs a put and a wait. The same on all ranks, whose
  // slots are alike where the last round is cut.
  std::vector<SlotGroup> Groups(size_t d) const;
  int Target(size_t d) const { return builder_.RailPeer(-rounds_[d].distance); }
  int Sender(size_t d) const { return builder_.RailPeer(rounds_[d].distance); }

  // Round d's transfer to its target, which must have given leave (credit or entry), of its groups
  // the first; pacing: the target has first to confirm round d - 1.
  void Send(size_t d);
  // Waits for round d, confirms it to the sender of round d + 1 as soon as its heads are there, and
  // calls `arrived` for each group of slots in turn. Sends the groups that Send has left.
  void Receive(size_t d, const std::function<void(const SlotGroup&)>& arrived);

 private:
  struct Transfer {
    std::vector<PutPiece> heads;
    std::vector<std::vector<PutPiece>> groups;  // without the heads
  };
  Transfer Cut(int sender_node, size_t d) const;
  void Put(size_t d, const std::vector<PutPiece>& pieces);

  Builder& builder_;
  const int queue_;
  const AllGatherOptions& options_;
  const bool split_last_;
  const Payload payload_;
  const std::vector<DoublingRound> rounds_;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_DOUBLING_H_
