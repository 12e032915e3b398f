// TIDE-RS (paper, section 4 and algorithm 1): level 1 reduces inside a node, level 2 across nodes.
//
//   read phase     partials of remote destinations into the outbox, as many as it holds, then the
//                  own node's into the spare; the sources are free when the last one is summed
//   network phase  rounds send what is ready, waves land what has arrived; a sent outbox block is
//                  filled with the next destination
//
// One node: level 1 alone, and its sum is the output. One rank a node: no level 1, gradients travel
// as they are (paper, appendix F).
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "plan/builder.h"
#include "plan/node_reduction.h"
#include "plan/rail_reduction.h"
#include "plan/reduction_output.h"
#include "plan/reduction_shape.h"
#include "plan/shard_span.h"
#include "tide/error.h"
#include "tide/plan.h"

namespace tide {
namespace {

using internal::Builder;
using internal::Instance;
using internal::Interval;
using internal::NodeReduction;
using internal::RailReduction;
using internal::ReductionOutput;
using internal::ReductionShape;
using internal::Round;
using internal::ShardSpan;
using internal::SpanRun;
using internal::Unit;

class Planner {
 public:
  Planner(const GroupLayout& layout, const ReduceScatterSpec& spec, const Topology& topology,
          int rank, const ReduceScatterOptions& options)
      : span_(layout, spec),
        shape_(span_, spec, topology, options),
        builder_("reduce_scatter", Lane::kReduceScatter, topology, rank),
        output_(&builder_, span_, spec, shape_.needs_accumulator()),
        level1_(&builder_, span_, shape_, spec, options) {
    if (topology.nodes > 1) {
      level2_ = std::make_unique<RailReduction>(&builder_, span_, shape_, spec, options, &output_);
      MakeUnits();
    }
  }

  Program OneNode() {
    const Unit unit{0, 1, 1};
    level1_.Begin();
    level1_.Reduce(unit, {[&](int /*row*/, const SpanRun& run) { return output_.At(run); },
                          output_.dtype(), true});
    level1_.End();
    output_.End(level1_.sum_queue());
    builder_.Record(level1_.sum_queue(), {EventKind::kReadDone});
    builder_.Record(level1_.sum_queue(), {EventKind::kDone});
    return builder_.Finish();
  }

  Program SeveralNodes() {
    level1_.Begin();
    while (NextUnitFits(0)) ReduceNextUnit();
    ReduceOwnNode();
    RecordReadDoneOnce();

    level2_->Begin();
    const auto waves = static_cast<int>(shape_.waves().size());
    int sent = 0;  // outbox blocks
    for (int x = 0; x < shape_.instances(); ++x) {
      const Instance instance = shape_.At(x);
      for (const Round& round : shape_.rounds()) {
        if (round.wave != x % waves) continue;
        level2_->Send(round, instance.pass, TakeFilled(round));
        sent += round.count;
        while (NextUnitFits(sent)) ReduceNextUnit();
        RecordReadDoneOnce();
      }
      level2_->Land(instance, own_[static_cast<size_t>(instance.pass)], level1_);
    }
    level2_->End();
    if (shape_.own_from_gradient()) builder_.Record(level2_->land_queue(), {EventKind::kReadDone});
    builder_.Record(level2_->land_queue(), {EventKind::kDone});
    return builder_.Finish();
  }

 private:
  // In the order of sending. Direct: a round at a time, so that its pushes coalesce over the
  // destination nodes; latin square: one destination at a time, coalesced over its ranks.
  void MakeUnits() {
    for (int pass = 0; pass < shape_.passes(); ++pass) {
      for (const Round& round : shape_.rounds()) {
        const int step = shape_.latin() ? 1 : round.count;
        for (int c = 0; c < round.count; c += step) units_.push_back({pass, round.first + c, step});
      }
    }
  }

  // Whether the outbox has room for the next unit once `sent` blocks are free again.
  bool NextUnitFits(int sent) const {
    if (next_ == units_.size()) return false;
    return reduced_blocks_ + units_[next_].count <= shape_.outbox_blocks() + sent;
  }

  void ReduceNextUnit() {
    const Unit& unit = units_[next_++];
    reduced_blocks_ += unit.count;
    level2_->AwaitOutbox(level1_.sum_queue(), unit);
    const Interval part = level1_.Part(unit, builder_.local());
    if (builder_.siblings() == 1) {
      Forward(unit, part, level2_->Outbox(unit, part));
    } else {
      level1_.Reduce(unit, {level2_->Outbox(unit, part), DType::kF32, false});
    }
    filled_.push_back(builder_.NewEvent());
    builder_.Record(level1_.sum_queue(), filled_.back());
  }

  void ReduceOwnNode() {
    for (int pass = 0; pass < shape_.passes(); ++pass) {
      own_.push_back(builder_.NewEvent());
      if (shape_.own_from_gradient()) continue;
      if (pass == 0) level2_->AwaitSpare(level1_.sum_queue());
      const Unit unit{pass, builder_.nodes(), 1};
      const Interval part = level1_.Part(unit, builder_.local());
      if (builder_.siblings() == 1) {
        Forward(unit, part, level2_->Spare(unit, part));
      } else {
        level1_.Reduce(unit, {level2_->Spare(unit, part), DType::kF32, false});
      }
      builder_.Record(level1_.sum_queue(), own_.back());
    }
  }

  // One rank a node: there is nothing to sum. The wire takes the gradients as they are, or, where
  // their dtypes differ, as fp32.
  void Forward(const Unit& unit, Interval part, const NodeReduction::Sink& sink) {
    const std::vector<int> rows = level1_.Rows(unit, builder_.local());
    std::vector<Piece> copies;
    std::vector<CastPiece> casts;
    for (size_t row = 0; row < rows.size(); ++row) {
      for (const SpanRun& run : span_.Runs(part)) {
        const int64_t live = span_.LiveElems(run, rows[row]);
        if (live == 0) continue;
        const DType dtype = span_.dtype(run.participant);
        const Ref dst = sink(static_cast<int>(row), run);
        const Ref src = level1_.Gradient(run, rows[row]);
        if (dtype == shape_.wire_dtype()) {
          copies.push_back({dst, src, live * static_cast<int64_t>(ItemSize(dtype))});
        } else {
          casts.push_back({dst, src, live, shape_.wire_dtype(), dtype});
        }
      }
    }
    if (!copies.empty()) {
      Operation& copy = builder_.Add(level1_.sum_queue(), OpKind::kCopy);
      copy.peer = builder_.rank();
      copy.pieces = std::move(copies);
    }
    if (!casts.empty()) {
      builder_.Add(level1_.sum_queue(), OpKind::kCast).casts = std::move(casts);
    }
  }

  // The event that fills the last of the round's blocks: rounds take units in order.
  Event TakeFilled(const Round& round) {
    for (int blocks = 0; blocks < round.count;) blocks += units_[sent_units_++].count;
    return filled_[sent_units_ - 1];
  }

  void RecordReadDoneOnce() {
    if (next_ < units_.size() || read_done_) return;
    read_done_ = true;
    level1_.End();
    if (!shape_.own_from_gradient()) {
      builder_.Record(level1_.sum_queue(), {EventKind::kReadDone});
    }
  }

  const ShardSpan span_;
  const ReductionShape shape_;
  Builder builder_;
  ReductionOutput output_;
  NodeReduction level1_;
  std::unique_ptr<RailReduction> level2_;  // several nodes
  std::vector<Unit> units_;
  size_t next_ = 0;  // unit
  size_t sent_units_ = 0;
  int reduced_blocks_ = 0;  // of the units before it
  bool read_done_ = false;
  std::vector<Event> filled_;  // by unit
  std::vector<Event> own_;     // by pass
};

}  // namespace

Program PlanReduceScatter(const GroupLayout& layout, const ReduceScatterSpec& spec,
                          const Topology& topology, int rank, const ReduceScatterOptions& options) {
  internal::CheckRanks(layout, topology);
  Planner planner(layout, spec, topology, rank, options);
  return topology.nodes == 1 ? planner.OneNode() : planner.SeveralNodes();
}

RegionBytes ReduceScatterRegions(const GroupLayout& layout, const ReduceScatterSpec& spec,
                                 const Topology& topology, const ReduceScatterOptions& options) {
  internal::CheckRanks(layout, topology);
  const ShardSpan span(layout, spec);
  const ReductionShape shape(span, spec, topology, options);
  RegionBytes regions;
  regions.staging = StagingRegionBytes(topology, options.staging);
  if (topology.nodes == 1) return regions;
  regions.outbox = shape.outbox_blocks() * shape.block_bytes();
  regions.spare = shape.own_from_gradient() ? 0 : shape.passes() * shape.block_bytes();
  regions.inbox = shape.inbox_blocks() * shape.block_bytes();
  regions.generations = shape.generations();
  if (shape.needs_accumulator()) {
    for (const int param : spec.params) {
      regions.accumulator += layout.params()[static_cast<size_t>(param)].shard_elems *
                             static_cast<int64_t>(ItemSize(DType::kF32));
    }
  }
  return regions;
}

int64_t StagedBytes(const GroupLayout& layout, const ReduceScatterSpec& spec) {
  return ShardSpan(layout, spec).StagedBytes();
}

int64_t StagingSlotBytes(int64_t staged_bytes, const StagingOptions& bounds,
                         const Topology& topology, int round_width) {
  int64_t wanted = staged_bytes;
  const auto bound = [&](int64_t bytes) {
    wanted = std::min(wanted, AlignUp(bytes, kStagingAlignment));
  };
  if (bounds.slot_bytes > 0) bound(bounds.slot_bytes);
  if (bounds.node_bytes > 0) bound(bounds.node_bytes / topology.local_ranks);
  if (bounds.slots > 2) bound((2 * staged_bytes + bounds.slots - 1) / bounds.slots);
  const int round = std::min(round_width, topology.nodes);  // no round is wider
  return std::max(wanted, std::max(topology.local_ranks, round) * kStagingAlignment);
}

int64_t StagingRegionBytes(const Topology& topology, const StagingOptions& staging) {
  return (topology.local_ranks - 1) * staging.slots * staging.slot_bytes;
}

}  // namespace tide
