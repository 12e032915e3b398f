// TIDE-RS on one node (paper, section 4.1 with M = 1: the sum is the output).
//
// The shards' slices are cut into chunks c = 0, 1, ...; chunk c uses staging slot c mod n_stg.
//   push queue   for each chunk, for each owner d: wait until d has released the slot's earlier
//   uses, push the
//                slice of d into d's staging, signal `filled` on d
//   sum queue    for each chunk: wait until every peer has filled it, sum in local-rank order with
//   the own
//                contribution last, signal `released` on every peer
// `filled` orders the push before the sum that reads it; `released` orders that sum before the push
// that reuses the slot, in this call or the next one. The first use of slot s in a call follows all
// earlier calls' uses because the wait's relative value is counted from a base that includes all of
// their releases.
#include <fmt/format.h>

#include <algorithm>

#include "plan/builder.h"
#include "plan/staging.h"
#include "tide/error.h"
#include "tide/plan.h"

namespace tide {
namespace {

using internal::Builder;
using internal::Chunk;
using internal::StagedRun;

void CheckSpec(const GroupLayout& layout, const ReduceScatterSpec& spec) {
  const auto known = static_cast<int>(layout.params().size());
  if (spec.params.size() != spec.grad_dtypes.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("reduce_scatter of group '{}': {} parameters but {} dtypes",
                            layout.name(), spec.params.size(), spec.grad_dtypes.size()));
  }
  for (const int param : spec.params) {
    if (param < 0 || param >= known) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("reduce_scatter of group '{}': expected a parameter in [0, {}), got {}",
                      layout.name(), known, param));
    }
  }
  const bool bytes = spec.output_dtype == DType::kU8 ||
                     std::count(spec.grad_dtypes.begin(), spec.grad_dtypes.end(), DType::kU8) > 0;
  if (bytes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("reduce_scatter of group '{}': u8 can't be summed", layout.name()));
  }
}

class Planner {
 public:
  Planner(const GroupLayout& layout, const ReduceScatterSpec& spec, const Topology& topology,
          int rank, const StagingOptions& staging)
      : layout_(layout),
        spec_(spec),
        staging_(staging),
        chunks_(internal::CutIntoChunks(layout, spec, staging.slot_bytes)),
        builder_("reduce_scatter", Lane::kReduceScatter, topology, rank) {
    push_ = builder_.AddQueue("push");
    sum_ = builder_.AddQueue("sum");
    AddBuffers();
  }

  Program Plan() {
    builder_.Await(push_, {EventKind::kReady});
    builder_.Fence(push_, CounterKind::kEntry);
    for (size_t c = 0; c < chunks_.size(); ++c) {
      PushChunk(static_cast<int64_t>(c));
      SumChunk(static_cast<int64_t>(c));
    }
    ZeroPadding();
    builder_.Record(sum_, {EventKind::kReadDone});
    builder_.Record(sum_, {EventKind::kDone});
    const auto uses = static_cast<int64_t>(chunks_.size());
    for (int i = 1; i < builder_.siblings(); ++i) {
      builder_.Expect({CounterKind::kFilled, builder_.Sibling(i)}, uses);
      builder_.Expect({CounterKind::kReleased, builder_.Sibling(i)}, uses);
    }
    return builder_.Finish();
  }

 private:
  void AddBuffers() {
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const ParamLayout& param = Param(static_cast<int>(i));
      gradients_.push_back(
          builder_.AddBuffer(BufferKind::kGradient, static_cast<int>(i),
                             param.shape.rows * param.shape.row_elems * Item(static_cast<int>(i))));
      output_offsets_.push_back(output_bytes_);
      output_bytes_ += param.shard_elems * OutputItem();
    }
    output_ = builder_.AddBuffer(BufferKind::kOutput, 0, output_bytes_);
    for (int distance = 1; distance < builder_.siblings(); ++distance) {
      staged_.push_back(
          builder_.AddBuffer(BufferKind::kStaging, distance, staging_.slots * staging_.slot_bytes));
    }
  }

  void PushChunk(int64_t c) {
    for (int i = 1; i < builder_.siblings(); ++i) {
      const int owner = builder_.Sibling(i);
      builder_.Wait(push_, {CounterKind::kReleased, owner},
                    std::max<int64_t>(c + 1 - staging_.slots, 0));
      std::vector<Piece> pieces;
      for (const StagedRun& run : chunks_[static_cast<size_t>(c)]) {
        const int64_t live = LiveElems(run, owner);
        if (live == 0) continue;
        pieces.push_back({Staged(builder_.rank(), owner, c, run), Gradient(run, owner),
                          live * Item(run.participant)});
      }
      if (!pieces.empty()) {
        Operation& copy = builder_.Add(push_, OpKind::kCopy);
        copy.peer = owner;
        copy.pieces = std::move(pieces);
      }
      builder_.Signal(push_, owner, CounterKind::kFilled);
    }
  }

  void SumChunk(int64_t c) {
    for (int i = 1; i < builder_.siblings(); ++i) {
      // Peers push to their next neighbour first: the last neighbour of a rank is the first to fill
      // it.
      builder_.Wait(sum_, {CounterKind::kFilled, builder_.Sibling(builder_.siblings() - i)}, c + 1);
    }
    std::vector<SumPiece> sums;
    for (const StagedRun& run : chunks_[static_cast<size_t>(c)]) {
      const int64_t live = LiveElems(run, builder_.rank());
      if (live > 0) sums.push_back(Sum(c, run, live));
    }
    if (!sums.empty()) {
      Operation& sum = builder_.Add(sum_, OpKind::kSum);
      sum.sums = std::move(sums);
      sum.accumulate = spec_.accumulate;
      sum.scaled = true;
    }
    for (int i = 1; i < builder_.siblings(); ++i) {
      builder_.Signal(sum_, builder_.Sibling(i), CounterKind::kReleased);
    }
  }

  // Operand order is part of the contract (paper, section 4.3).
  SumPiece Sum(int64_t c, const StagedRun& run, int64_t live) const {
    SumPiece piece;
    piece.dst = {output_, output_offsets_[static_cast<size_t>(run.participant)] +
                              run.first_elem * OutputItem()};
    for (int local = 0; local < builder_.siblings(); ++local) {
      if (local == builder_.rank()) continue;
      piece.sources.push_back(Staged(local, builder_.rank(), c, run));
    }
    piece.sources.push_back(Gradient(run, builder_.rank()));
    piece.elems = live;
    piece.dst_dtype = spec_.output_dtype;
    piece.src_dtype = spec_.grad_dtypes[static_cast<size_t>(run.participant)];
    return piece;
  }

  // Output rows past D_p are zero; an accumulating call finds them zero already.
  void ZeroPadding() {
    if (spec_.accumulate) return;
    std::vector<Piece> pieces;
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const int64_t live = layout_.LiveElems(spec_.params[i], builder_.rank());
      const int64_t padding = Param(static_cast<int>(i)).shard_elems - live;
      if (padding == 0) continue;
      const Ref dst{output_, output_offsets_[i] + live * OutputItem()};
      pieces.push_back({dst, dst, padding * OutputItem()});
    }
    if (!pieces.empty()) builder_.Add(sum_, OpKind::kZero).pieces = std::move(pieces);
  }

  const ParamLayout& Param(int participant) const {
    return layout_.params()[static_cast<size_t>(spec_.params[static_cast<size_t>(participant)])];
  }
  int64_t Item(int participant) const {
    return static_cast<int64_t>(ItemSize(spec_.grad_dtypes[static_cast<size_t>(participant)]));
  }
  int64_t OutputItem() const { return static_cast<int64_t>(ItemSize(spec_.output_dtype)); }

  // Elements of the run that `owner` really owns.
  int64_t LiveElems(const StagedRun& run, int owner) const {
    const int64_t live =
        layout_.LiveElems(spec_.params[static_cast<size_t>(run.participant)], owner);
    return std::clamp<int64_t>(live - run.first_elem, 0, run.elems);
  }

  // Where the run of `owner`'s slice starts in this rank's gradient.
  Ref Gradient(const StagedRun& run, int owner) const {
    const int64_t first = owner * Param(run.participant).shard_elems + run.first_elem;
    return {gradients_[static_cast<size_t>(run.participant)], first * Item(run.participant)};
  }

  // Where `filler` stages the run on `owner`. Buffers are named by distance, so they lie at equal
  // offsets on all ranks and a rank keeps none for itself.
  Ref Staged(int filler, int owner, int64_t c, const StagedRun& run) const {
    const int distance = (filler - owner + builder_.siblings()) % builder_.siblings();
    return {staged_[static_cast<size_t>(distance) - 1],
            c % staging_.slots * staging_.slot_bytes + run.slot_offset};
  }

  const GroupLayout& layout_;
  const ReduceScatterSpec& spec_;
  const StagingOptions staging_;
  const std::vector<Chunk> chunks_;
  Builder builder_;
  int push_ = 0;
  int sum_ = 0;
  int output_ = 0;
  int64_t output_bytes_ = 0;
  std::vector<int64_t> output_offsets_;
  std::vector<int> gradients_;
  std::vector<int> staged_;  // by distance - 1
};

}  // namespace

Program PlanReduceScatter(const GroupLayout& layout, const ReduceScatterSpec& spec,
                          const Topology& topology, int rank, const ReduceScatterOptions& options) {
  CheckSpec(layout, spec);
  return Planner(layout, spec, topology, rank, options.staging).Plan();
}

}  // namespace tide
