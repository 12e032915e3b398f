#include "plan/doubling.h"

#include <utility>

namespace tide::internal {

std::vector<DoublingRound> DoublingRounds(int nodes) {
  std::vector<DoublingRound> rounds;
  for (int distance = 1; distance < nodes; distance *= 2) {
    rounds.push_back({distance, std::min(distance, nodes - distance)});
  }
  return rounds;
}

Doubling::Doubling(Builder* builder, int queue, const AllGatherOptions& options, bool split_last,
                   Payload payload)
    : builder_(*builder),
      queue_(queue),
      options_(options),
      split_last_(split_last),
      payload_(std::move(payload)),
      rounds_(DoublingRounds(builder->nodes())) {}

std::vector<SlotGroup> Doubling::Groups(size_t d) const {
  const int slots = rounds_[d].slots;
  if (!split_last_ || d + 1 < rounds_.size()) return {{0, slots}};
  const int64_t bytes = Bytes(payload_(builder_.node(), rounds_[d].distance, 0, slots));
  const int64_t worthwhile =
      std::max<int64_t>(bytes / std::max<int64_t>(options_.min_stripe_bytes, 1), 1);
  const auto parts = static_cast<int>(std::min<int64_t>({slots, kMaxSlotGroups, worthwhile}));
  std::vector<SlotGroup> groups;
  for (int g = 0; g < parts; ++g) {
    const int first = slots * g / parts;
    groups.push_back({first, slots * (g + 1) / parts - first});
  }
  return groups;
}

Doubling::Transfer Doubling::Cut(int sender_node, size_t d) const {
  const StripeOptions stripes{options_.contexts, options_.min_stripe_bytes};
  const auto groups = Groups(d);
  Transfer transfer;
  for (size_t g = 0; g < groups.size(); ++g) {
    auto runs = payload_(sender_node, rounds_[d].distance, groups[g].first, groups[g].count);
    // Nobody waits for a confirmation of the last round.
    if (options_.head_bytes > 0 && d + 1 < rounds_.size()) {
      const int64_t head = options_.head_bytes / static_cast<int64_t>(rounds_.size() - 1);
      transfer.heads = Stripe(TakeFront(&runs, head), stripes, CounterKind::kHead, 0);
    }
    transfer.groups.push_back(Stripe(runs, stripes, CounterKind::kArrived, static_cast<int>(g)));
  }
  return transfer;
}

void Doubling::Send(size_t d) {
  if (d > 0) {
    builder_.Wait(queue_, {CounterKind::kConfirmed, Target(d)}, 1).sync = Sync::kPacing;
    builder_.Expect({CounterKind::kConfirmed, Target(d)}, 1);
  }
  const Transfer transfer = Cut(builder_.node(), d);
  if (!transfer.heads.empty()) Put(d, transfer.heads);
  Put(d, transfer.groups[0]);
}

void Doubling::Put(size_t d, const std::vector<PutPiece>& pieces) {
  Operation& put = builder_.Add(queue_, OpKind::kPut);
  put.peer = Target(d);
  put.puts = pieces;
}

void Doubling::Receive(size_t d, const std::function<void(const SlotGroup&)>& arrived) {
  const int sender = Sender(d);
  const auto groups = Groups(d);
  const Transfer mine = groups.size() > 1 ? Cut(builder_.node(), d) : Transfer();
  const Transfer transfer = Cut(builder_.topology().Node(sender), d);
  const auto wait = [&](const std::vector<PutPiece>& pieces) {
    for (const Increment& increment : Increments(pieces, sender)) {
      builder_.Wait(queue_, increment.counter, increment.value);
      builder_.Expect(increment.counter, increment.value);
    }
  };
  const auto confirm = [&] {
    if (d + 1 == rounds_.size()) return;
    builder_.Signal(queue_, Sender(d + 1), CounterKind::kConfirmed).sync = Sync::kPacing;
  };
  wait(transfer.heads);
  if (!transfer.heads.empty()) confirm();
  for (size_t g = 0; g < groups.size(); ++g) {
    if (g > 0) Put(d, mine.groups[g]);
    wait(transfer.groups[g]);
    arrived(groups[g]);
  }
  if (transfer.heads.empty()) confirm();
}

}  // namespace tide::internal
