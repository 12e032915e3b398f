#include "plan/node_reduction.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tide/error.h"

namespace tide::internal {
namespace {

constexpr size_t kChunksBetweenChecks = 1024;

}  // namespace

NodeReduction::NodeReduction(Builder* builder, const ShardSpan& span, const ReductionShape& shape,
                             const ReduceScatterSpec& spec, const ReduceScatterOptions& options)
    : builder_(*builder),
      span_(span),
      shape_(shape),
      spec_(spec),
      staging_(options.staging),
      check_interrupt_(options.check_interrupt),
      push_(builder->AddQueue("push")),
      sum_(builder->AddQueue("sum")),
      pushed_(static_cast<size_t>(builder->siblings())) {
  if (builder_.siblings() > 1 && staging_.slot_bytes < kStagingAlignment) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("staging slot: expected at least {} bytes, got {}", kStagingAlignment,
                            staging_.slot_bytes));
  }
  for (int i = 0; i < span.participants(); ++i) {
    const ParamShape& shape_of = span.param(i).shape;
    gradients_.push_back(builder_.AddBuffer(BufferKind::kGradient, i,
                                            shape_of.rows * shape_of.row_elems * span.item(i)));
  }
  for (int distance = 1; distance < builder_.siblings(); ++distance) {
    staged_.push_back(
        builder_.AddBuffer(BufferKind::kStaging, distance, staging_.slots * staging_.slot_bytes));
  }
}

Ref NodeReduction::Gradient(const SpanRun& run, int rank) const {
  const int64_t first = rank * span_.param(run.participant).shard_elems + run.first_elem;
  return {gradients_[static_cast<size_t>(run.participant)], first * span_.item(run.participant)};
}

std::vector<int> NodeReduction::Rows(const Unit& unit, int local) const {
  const Topology& topology = builder_.topology();
  std::vector<int> rows;
  for (int c = unit.first; c < unit.first + unit.count; ++c) {
    const int node = (builder_.node() + c) % builder_.nodes();
    if (!shape_.latin()) {
      rows.push_back(topology.Rank(node, local));
      continue;
    }
    for (int d = 0; d < builder_.siblings(); ++d) rows.push_back(topology.Rank(node, d));
  }
  return rows;
}

Interval NodeReduction::Part(const Unit& unit, int local) const {
  const int slice = shape_.latin() ? SubSlice(builder_.topology(), local, unit.first) : 0;
  return shape_.Part(slice, unit.pass);
}

void NodeReduction::Begin() {
  if (builder_.siblings() > 1) builder_.Await(push_, {EventKind::kReady});
  builder_.Await(sum_, {EventKind::kReady});  // the own contribution is read in place
}

void NodeReduction::Reduce(const Unit& unit, const Target& to) {
  // By owner, in this rank's order; the first is this rank itself.
  std::vector<std::vector<Chunk>> chunks;
  size_t most = 0;
  for (int i = 0; i < builder_.siblings(); ++i) {
    const int local = builder_.topology().Local(builder_.Sibling(i));
    const auto rows = static_cast<int>(Rows(unit, local).size());
    const StagingOptions& staging = builder_.siblings() > 1 ? staging_ : StagingOptions{};
    chunks.push_back(span_.CutIntoChunks(Part(unit, local), rows, staging));
    most = std::max(most, chunks.back().size());
  }
  for (size_t c = 0; c < most; ++c) {
    if (c % kChunksBetweenChecks == 0) check_interrupt_();
    for (int i = 1; i < builder_.siblings(); ++i) {
      const auto& of_owner = chunks[static_cast<size_t>(i)];
      if (c < of_owner.size()) Push(unit, builder_.Sibling(i), of_owner[c]);
    }
    if (c < chunks[0].size()) Sum(unit, chunks[0][c], to);
  }
}

void NodeReduction::Push(const Unit& unit, int owner, const Chunk& chunk) {
  const int local = builder_.topology().Local(owner);
  const int64_t use = pushed_[static_cast<size_t>(local)]++;
  // The first use of the first slot waits for all releases of earlier calls, of every slot.
  if (use == 0 || use >= staging_.slots) {
    builder_.Wait(push_, {CounterKind::kReleased, owner},
                  std::max<int64_t>(use + 1 - staging_.slots, 0));
  }
  const std::vector<int> rows = Rows(unit, local);
  std::vector<Piece> pieces;
  for (const StagedRun& staged : chunk) {
    const int64_t item = span_.item(staged.run.participant);
    const int64_t shard = span_.param(staged.run.participant).shard_elems * item;
    int before = -1;  // rank of the row before
    for (size_t row = 0; row < rows.size(); ++row) {
      const int64_t bytes = span_.LiveElems(staged.run, rows[row]) * item;
      if (bytes == 0) continue;
      // Rows of equal length at a constant distance are one pitched piece; a final padded row is a
      // piece of its own, and so is the wrap from the last node to the first.
      Piece* last = pieces.empty() || before < 0 ? nullptr : &pieces.back();
      const int64_t pitch = (rows[row] - before) * shard;
      if (last != nullptr && last->row_bytes == bytes && pitch > 0 &&
          (last->rows == 1 || last->src_pitch == pitch)) {
        ++last->rows;
        last->src_pitch = pitch;
        last->dst_pitch = staged.stride;
      } else {
        pieces.push_back({Staged(builder_.rank(), owner, use, staged, static_cast<int>(row)),
                          Gradient(staged.run, rows[row]), bytes});
      }
      before = rows[row];
    }
  }
  if (!pieces.empty()) {
    Operation& copy = builder_.Add(push_, OpKind::kCopy);
    copy.peer = owner;
    copy.pieces = std::move(pieces);
  }
  builder_.Signal(push_, owner, CounterKind::kFilled);
}

void NodeReduction::Sum(const Unit& unit, const Chunk& chunk, const Target& to) {
  const int siblings = builder_.siblings();
  const int64_t use = pushed_[static_cast<size_t>(builder_.local())]++;
  for (int i = 1; i < siblings; ++i) {
    // Siblings push to their next neighbour first: the last neighbour of a rank is the first to
    // fill it.
    builder_.Wait(sum_, {CounterKind::kFilled, builder_.Sibling(siblings - i)}, use + 1);
  }
  const std::vector<int> rows = Rows(unit, builder_.local());
  std::vector<SumPiece> sums;
  for (const StagedRun& staged : chunk) {
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto row = static_cast<int>(r);
      const int64_t live = span_.LiveElems(staged.run, rows[r]);
      if (live == 0) continue;
      SumPiece& piece = sums.emplace_back();
      piece.dst = to.sink(row, staged.run);
      // Operand order is part of the contract (paper, section 4.3).
      piece.sources.reserve(static_cast<size_t>(siblings));
      for (int local = 0; local < siblings; ++local) {
        const int filler = builder_.topology().Rank(builder_.node(), local);
        if (filler == builder_.rank()) continue;
        piece.sources.push_back(Staged(filler, builder_.rank(), use, staged, row));
      }
      piece.sources.push_back(Gradient(staged.run, rows[r]));
      piece.elems = live;
      piece.dst_dtype = to.dtype;
      piece.src_dtype = span_.dtype(staged.run.participant);
    }
  }
  if (!sums.empty()) {
    Operation& sum = builder_.Add(sum_, OpKind::kSum);
    sum.sums = std::move(sums);
    sum.scaled = to.is_output;
    sum.accumulate = to.is_output && spec_.accumulate;
  }
  builder_.SignalSiblings(sum_, CounterKind::kReleased);
}

// Buffers are named by distance, so they lie at equal offsets on all ranks and a rank keeps none
// for itself.
Ref NodeReduction::Staged(int filler, int owner, int64_t use, const StagedRun& run, int row) const {
  const int distance = (filler - owner + builder_.siblings()) % builder_.siblings();
  return {staged_[static_cast<size_t>(distance) - 1],
          use % staging_.slots * staging_.slot_bytes + run.slot_offset + row * run.stride};
}

void NodeReduction::End() {
  if (builder_.siblings() > 1) {
    // The sources are free when the pushes have read them too.
    const Event pushed = builder_.NewEvent();
    builder_.Record(push_, pushed);
    builder_.Await(sum_, pushed);
  }
  const int64_t summed = pushed_[static_cast<size_t>(builder_.local())];
  for (int i = 1; i < builder_.siblings(); ++i) {
    const int sibling = builder_.Sibling(i);
    builder_.Expect({CounterKind::kFilled, sibling}, summed);
    builder_.Expect({CounterKind::kReleased, sibling},
                    pushed_[static_cast<size_t>(builder_.topology().Local(sibling))]);
  }
}

}  // namespace tide::internal
