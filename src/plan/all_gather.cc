// TIDE-AG (paper, section 3).
//
// One node: entry fence, one batch of multicasts, completion fence. Shards that need a cast are
// cast into the own landing, part by part on a queue of its own, and sent from there. A refresh of
// a landing that holds the parameters still has one operation in place of those.
//
// Several nodes, four queues, so that no rank waits for its slowest sibling (section 3.2):
//   readiness   the landing is free: tell the siblings
//   rounds      recursive doubling over the rail into the receive stage; at the end, credits
//   scatters    own slot, then slots as they arrive: multicast into the node's landings
//   completion  siblings have scattered everything: the landing may be read
// `entry` orders a landing's last reader before the siblings' multicasts; `arrived` a transfer
// before its scatter and its forwarding; `credit` the scatters and forwards of a call before the
// next call's puts into the same stage; `landed` all multicasts before the landing's next reader.
#include <fmt/format.h>

#include <algorithm>

#include "plan/builder.h"
#include "plan/doubling.h"
#include "plan/shard_slots.h"
#include "tide/error.h"
#include "tide/plan.h"

namespace tide {
namespace {

using internal::Builder;
using internal::Doubling;
using internal::Run;
using internal::ShardSlots;
using internal::SlotGroup;

void CheckDtypes(const GroupLayout& layout, const std::vector<DType>& shard_dtypes) {
  if (shard_dtypes.size() != layout.params().size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("all_gather of group '{}': expected {} shards, got {}", layout.name(),
                            layout.params().size(), shard_dtypes.size()));
  }
  for (size_t p = 0; p < shard_dtypes.size(); ++p) {
    const DType gather = layout.params()[p].shape.dtype;
    if (shard_dtypes[p] != gather && (shard_dtypes[p] == DType::kU8 || gather == DType::kU8)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("all_gather of group '{}', parameter '{}': can't cast {} to {}",
                              layout.name(), layout.params()[p].shape.name, Name(shard_dtypes[p]),
                              Name(gather)));
    }
  }
}

void CheckOptions(const GroupLayout& layout, const std::vector<DType>& shard_dtypes,
                  const Topology& topology, const AllGatherOptions& options) {
  if (options.contexts < 1 || options.contexts > kMaxContexts) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("all_gather: contexts: expected 1 to {}, got {}", kMaxContexts,
                            options.contexts));
  }
  if (options.refresh && topology.nodes > 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("all_gather of group '{}': a landing is refreshed on one node only, got "
                    "{} nodes; expected refresh = false",
                    layout.name(), topology.nodes));
  }
  for (size_t p = 0; options.resident && p < shard_dtypes.size(); ++p) {
    if (shard_dtypes[p] == layout.params()[p].shape.dtype) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("all_gather of group '{}': shards are resident, but parameter '{}' "
                            "needs a cast from {} to {}; expected equal dtypes",
                            layout.name(), layout.params()[p].shape.name, Name(shard_dtypes[p]),
                            Name(layout.params()[p].shape.dtype)));
  }
}

class Planner {
 public:
  Planner(const GroupLayout& layout, const std::vector<DType>& shard_dtypes,
          const Topology& topology, int rank, const AllGatherOptions& options)
      : layout_(layout),
        dtypes_(shard_dtypes),
        options_(options),
        builder_(options.refresh ? "refreshing all_gather" : "all_gather", Lane::kAllGather,
                 topology, rank) {
    landing_ = builder_.AddBuffer(BufferKind::kLanding, 0, layout.landing_bytes());
    for (size_t p = 0; p < dtypes_.size(); ++p) {
      const int64_t item = static_cast<int64_t>(ItemSize(dtypes_[p]));
      shards_.push_back(builder_.AddBuffer(BufferKind::kShard, static_cast<int>(p),
                                           layout.params()[p].shard_elems * item));
    }
  }

  Program OneNode();
  Program Refresh();
  Program LandingToLanding();
  Program ThroughStage();

 private:
  // Own shards that need no cast, and those that do, as pieces to `place(p)`.
  struct OwnShards {
    std::vector<Piece> copies;
    std::vector<CastPiece> casts;
  };
  template <typename Place>
  OwnShards Own(const Place& place) const;
  Ref OwnLanding(int param) const {
    return {landing_, layout_.LandingOffset(param, builder_.rank())};
  }
  // Brings the own shards to `place(p)` in own memory.
  template <typename Place>
  void Gather(int queue, const Place& place);
  std::vector<std::vector<CastPiece>> CastParts(const std::vector<CastPiece>& casts) const;

  const GroupLayout& layout_;
  const std::vector<DType>& dtypes_;
  const AllGatherOptions& options_;
  Builder builder_;
  int landing_ = 0;
  std::vector<int> shards_;
};

template <typename Place>
Planner::OwnShards Planner::Own(const Place& place) const {
  OwnShards own;
  for (size_t i = 0; i < dtypes_.size(); ++i) {
    const ParamLayout& param = layout_.params()[i];
    if (param.shard_bytes == 0) continue;
    const Ref dst = place(static_cast<int>(i));
    if (dtypes_[i] == param.shape.dtype) {
      own.copies.push_back({dst, {shards_[i], 0}, param.shard_bytes});
    } else {
      own.casts.push_back({dst, {shards_[i], 0}, param.shard_elems, param.shape.dtype, dtypes_[i]});
    }
  }
  return own;
}

template <typename Place>
void Planner::Gather(int queue, const Place& place) {
  OwnShards own = Own(place);
  if (!own.copies.empty()) {
    Operation& copy = builder_.Add(queue, OpKind::kCopy);
    copy.peer = builder_.rank();
    copy.pieces = std::move(own.copies);
  }
  if (!own.casts.empty()) builder_.Add(queue, OpKind::kCast).casts = std::move(own.casts);
}

int64_t CastBytes(const CastPiece& cast) {
  return cast.elems * static_cast<int64_t>(ItemSize(cast.dst_dtype));
}

// Cuts the casts into parts of first_cast_bytes, twice that, and so on. A cast is faster than the
// links, so the next part is ready when the one before has been sent.
std::vector<std::vector<CastPiece>> Planner::CastParts(const std::vector<CastPiece>& casts) const {
  if (casts.empty()) return {};
  if (options_.first_cast_bytes <= 0) return {casts};
  std::vector<std::vector<CastPiece>> parts(1);
  int64_t bound = options_.first_cast_bytes;
  int64_t room = bound;
  for (CastPiece left : casts) {
    const auto dst_item = static_cast<int64_t>(ItemSize(left.dst_dtype));
    const auto src_item = static_cast<int64_t>(ItemSize(left.src_dtype));
    while (left.elems > 0) {
      CastPiece piece = left;
      piece.elems = std::min(left.elems, AlignUp(room, kStagingAlignment) / dst_item);
      parts.back().push_back(piece);
      left.dst.offset += piece.elems * dst_item;
      left.src.offset += piece.elems * src_item;
      left.elems -= piece.elems;
      room -= piece.elems * dst_item;
      if (room > 0) continue;
      bound *= 2;
      room = bound;
      parts.emplace_back();
    }
  }
  if (parts.back().empty()) parts.pop_back();
  return parts;
}

Program Planner::OneNode() {
  const int queue = builder_.AddQueue("main");
  OwnShards own = Own([&](int p) { return OwnLanding(p); });
  std::vector<std::vector<CastPiece>> parts = CastParts(own.casts);
  // With one part there is nothing to run beside it.
  const int casts = parts.size() > 1 ? builder_.AddQueue("casts") : queue;
  builder_.Await(queue, {EventKind::kReady});
  if (casts != queue) builder_.Await(casts, {EventKind::kReady});
  builder_.Fence(queue, CounterKind::kEntry);
  if (!own.copies.empty()) {
    builder_.Add(queue, OpKind::kMulticast).pieces = std::move(own.copies);
  }
  for (std::vector<CastPiece>& part : parts) {
    std::vector<Piece> pieces;  // from the own landing to the peers'
    pieces.reserve(part.size());
    for (const CastPiece& cast : part) pieces.push_back({cast.dst, cast.dst, CastBytes(cast)});
    builder_.Add(casts, OpKind::kCast).casts = std::move(part);
    if (casts != queue) {
      const Event cast = builder_.NewEvent();
      builder_.Record(casts, cast);
      builder_.Await(queue, cast);
    }
    Operation& multicast = builder_.Add(queue, OpKind::kMulticast);
    multicast.pieces = std::move(pieces);
    multicast.span = Span::kPeers;
  }
  builder_.Record(queue, {EventKind::kReadDone});
  builder_.Fence(queue, CounterKind::kLanded);
  builder_.Record(queue, {EventKind::kDone});
  return builder_.Finish();
}

Program Planner::Refresh() {
  const int queue = builder_.AddQueue("main");
  std::vector<CastPiece> pieces;
  for (size_t p = 0; p < dtypes_.size(); ++p) {
    const ParamLayout& param = layout_.params()[p];
    if (param.shard_elems == 0) continue;
    pieces.push_back({OwnLanding(static_cast<int>(p)),
                      {shards_[p], 0},
                      param.shard_elems,
                      param.shape.dtype,
                      dtypes_[p]});
  }
  builder_.Await(queue, {EventKind::kReady});
  builder_.Fence(queue, CounterKind::kEntry);
  if (!pieces.empty()) builder_.Add(queue, OpKind::kRefresh).casts = std::move(pieces);
  builder_.Record(queue, {EventKind::kReadDone});
  builder_.Fence(queue, CounterKind::kLanded);
  builder_.Record(queue, {EventKind::kDone});
  return builder_.Finish();
}

// One rank a node: slots of consecutive nodes are neighbours in the landing, so the rounds run from
// landing to landing (paper, appendix F). `entry` goes to the ranks that put here.
Program Planner::LandingToLanding() {
  const int queue = builder_.AddQueue("rounds");
  Doubling doubling(&builder_, queue, options_, /*split_last=*/false,
                    [&](int sender_node, int /*distance*/, int first, int count) {
                      return internal::LandingRuns(layout_, builder_.nodes(), landing_,
                                                   sender_node + first, count);
                    });
  builder_.Await(queue, {EventKind::kReady});
  for (size_t d = 0; d < doubling.rounds().size(); ++d) {
    builder_.Signal(queue, doubling.Sender(d), CounterKind::kEntry);
  }
  Gather(queue, [&](int p) { return OwnLanding(p); });
  for (size_t d = 0; d < doubling.rounds().size(); ++d) {
    const Counter entered{CounterKind::kEntry, doubling.Target(d)};
    builder_.Wait(queue, entered, 1);
    builder_.Expect(entered, 1);
    doubling.Send(d);
    doubling.Receive(d, [](const SlotGroup&) {});
  }
  builder_.Record(queue, {EventKind::kReadDone});
  builder_.Record(queue, {EventKind::kDone});
  return builder_.Finish();
}

Program Planner::ThroughStage() {
  const int readiness = builder_.AddQueue("readiness");
  const int rounds = builder_.AddQueue("rounds");
  const int scatters = builder_.AddQueue("scatters");
  const int completion = builder_.AddQueue("completion");
  ShardSlots slots(&builder_, layout_, landing_, options_.resident);
  Doubling doubling(&builder_, rounds, options_, /*split_last=*/true,
                    [&](int /*sender_node*/, int distance, int first, int count) {
                      return slots.Runs(first, distance + first, count);
                    });

  builder_.Await(readiness, {EventKind::kReady});
  builder_.SignalSiblings(readiness, CounterKind::kEntry);
  builder_.Await(rounds, {EventKind::kReady});
  if (!options_.resident) Gather(rounds, [&](int p) { return slots.Own(p); });
  const Event packed = builder_.NewEvent();
  builder_.Record(rounds, packed);
  for (size_t d = 0; d < doubling.rounds().size(); ++d) {
    // Pairs with the credits below, of the target's previous call.
    builder_.Wait(rounds, {CounterKind::kCredit, doubling.Target(d)}, 0);
    builder_.Expect({CounterKind::kCredit, doubling.Target(d)}, 1);
    doubling.Send(d);
    if (d == 0) {
      builder_.WaitForSiblings(scatters, CounterKind::kEntry, 1);
      builder_.ExpectOfSiblings(CounterKind::kEntry, 1);
      builder_.Await(scatters, packed);
      slots.Scatter(scatters, 0, 1);
    }
    doubling.Receive(d, [&](const SlotGroup& group) {
      const Event arrived = builder_.NewEvent();
      builder_.Record(rounds, arrived);
      builder_.Await(scatters, arrived);
      slots.Scatter(scatters, doubling.rounds()[d].distance + group.first, group.count);
    });
  }
  const Event scattered = builder_.NewEvent();
  builder_.Record(scatters, scattered);
  builder_.SignalSiblings(scatters, CounterKind::kLanded);
  // All slots of the call are scattered and forwarded: the whole stage is free again.
  builder_.Await(rounds, scattered);
  for (size_t d = 0; d < doubling.rounds().size(); ++d) {
    builder_.Signal(rounds, doubling.Sender(d), CounterKind::kCredit);
  }
  builder_.Record(rounds, {EventKind::kReadDone});
  builder_.Await(completion, {EventKind::kReadDone});
  builder_.WaitForSiblings(completion, CounterKind::kLanded, 1);
  builder_.ExpectOfSiblings(CounterKind::kLanded, 1);
  builder_.Record(completion, {EventKind::kDone});
  return builder_.Finish();
}

}  // namespace

Program PlanAllGather(const GroupLayout& layout, const std::vector<DType>& shard_dtypes,
                      const Topology& topology, int rank, const AllGatherOptions& options) {
  CheckDtypes(layout, shard_dtypes);
  CheckOptions(layout, shard_dtypes, topology, options);
  internal::CheckRanks(layout, topology);
  Planner planner(layout, shard_dtypes, topology, rank, options);
  if (options.refresh) return planner.Refresh();
  if (topology.nodes == 1) return planner.OneNode();
  if (topology.local_ranks == 1) return planner.LandingToLanding();
  return planner.ThroughStage();
}

RegionBytes AllGatherRegions(const GroupLayout& layout, const Topology& topology,
                             const AllGatherOptions& options) {
  RegionBytes regions;
  if (topology.nodes > 1 && topology.local_ranks > 1) {
    regions.stage = internal::StageBytes(layout, topology, options.resident);
  }
  return regions;
}

}  // namespace tide
