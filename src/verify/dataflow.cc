#include "verify/dataflow.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace tide::verify {
namespace {

int64_t Item(DType dtype) { return static_cast<int64_t>(ItemSize(dtype)); }

// Calls f(dst offset, src offset, bytes) for each run of contiguous bytes.
template <typename F>
void ForRuns(const Piece& piece, const F& f) {
  const bool contiguous =
      piece.rows == 1 || (piece.dst_pitch == piece.row_bytes && piece.src_pitch == piece.row_bytes);
  if (contiguous) {
    f(0, 0, piece.rows * piece.row_bytes);
    return;
  }
  for (int64_t row = 0; row < piece.rows; ++row) {
    f(row * piece.dst_pitch, row * piece.src_pitch, piece.row_bytes);
  }
}

}  // namespace

Dataflow::Dataflow(const Model& model, History* history, Findings* findings)
    : model_(model),
      history_(*history),
      findings_(*findings),
      contract_(&expressions_),
      memories_(static_cast<size_t>(model.memories())) {}

Memory& Dataflow::At(int object, int rank) {
  const int memory = model_.memory(object, rank);
  auto& slot = memories_[static_cast<size_t>(memory)];
  if (slot == nullptr) slot = std::make_unique<Memory>(memory, &history_);
  return *slot;
}

void Dataflow::Read(const Step& step, Place place, int rank, int64_t bytes, const Actor& actor,
                    std::vector<Portion>* portions) {
  if (bytes == 0) return;
  if (!Predecessor(step)) {
    At(place.object, rank).Read(place.offset, place.offset + bytes, actor, portions);
  } else if (model_.lane_owned(model_.memory(place.object, rank))) {
    At(place.object, rank).TouchAll(actor, false);
  }
}

void Dataflow::Write(const Step& step, Place place, int rank, int64_t bytes, const Actor& actor,
                     const std::vector<Portion>& portions) {
  if (bytes == 0) return;
  if (!Predecessor(step)) {
    At(place.object, rank).Write(place.offset, place.offset + bytes, actor, portions);
  } else if (model_.lane_owned(model_.memory(place.object, rank))) {
    At(place.object, rank).TouchAll(actor, true);
  }
}

void Dataflow::Run(const Step& step, const Actor& actor) {
  if (step.caller != nullptr) {
    if (step.caller->kind == CallerStep::Kind::kWrite) CallerWrite(step, actor);
    if (step.caller->kind == CallerStep::Kind::kRead) CallerRead(step, actor);
    return;
  }
  const Operation& op = *step.op;
  for (const Piece& piece : op.pieces) {
    op.kind == OpKind::kZero ? Zero(step, piece, actor) : Copy(step, piece, actor);
  }
  for (const CastPiece& piece : op.casts) {
    op.kind == OpKind::kRefresh ? Refresh(step, piece, actor) : Cast(step, piece, actor);
  }
  for (const SumPiece& piece : op.sums) Sum(step, piece, actor);
  for (const LandPiece& piece : op.lands) Land(step, piece, actor);
}

std::vector<int> Dataflow::Targets(const Step& step) const {
  const OpKind kind = step.op->kind;
  if (kind == OpKind::kCopy) return {step.op->peer};
  if (kind != OpKind::kMulticast && kind != OpKind::kRefresh) return {step.rank};
  const Topology& topology = model_.input().topology;
  std::vector<int> targets;
  for (int local = 0; local < topology.local_ranks; ++local) {
    const int rank = topology.Rank(topology.Node(step.rank), local);
    if (rank != step.rank || step.op->span == Span::kNode) targets.push_back(rank);
  }
  return targets;
}

void Dataflow::WriteTargets(const Step& step, Place place, int64_t bytes, const Actor& actor,
                            const std::vector<Portion>& portions, int source_memory) {
  int last = source_memory;
  for (const int target : Targets(step)) {
    const int memory = model_.memory(place.object, target);
    if (memory == last) continue;
    last = memory;
    Write(step, place, target, bytes, actor, portions);
  }
}

void Dataflow::Copy(const Step& step, const Piece& piece, const Actor& actor) {
  const Place src = model_.place(step, piece.src);
  const Place dst = model_.place(step, piece.dst);
  ForRuns(piece, [&](int64_t dst_offset, int64_t src_offset, int64_t bytes) {
    scratch_.clear();
    const Place from{src.object, src.offset + src_offset};
    const Place to{dst.object, dst.offset + dst_offset};
    Read(step, from, step.rank, bytes, actor, &scratch_);
    // What is its own source is not written.
    const int source = from.offset == to.offset ? model_.memory(from.object, step.rank) : -1;
    WriteTargets(step, to, bytes, actor, scratch_, source);
  });
}

void Dataflow::Put(const Step& step, const PutPiece& put, const Actor& reader,
                   const Actor& writer) {
  scratch_.clear();
  Read(step, model_.place(step, put.src), step.rank, put.bytes, reader, &scratch_);
  Write(step, model_.place(step, put.dst), step.op->peer, put.bytes, writer, scratch_);
}

void Dataflow::Zero(const Step& step, const Piece& piece, const Actor& actor) {
  const Place dst = model_.place(step, piece.dst);
  ForRuns(piece, [&](int64_t dst_offset, int64_t /*src_offset*/, int64_t bytes) {
    Write(step, {dst.object, dst.offset + dst_offset}, step.rank, bytes, actor,
          {{bytes, Uniform(kZeroExpr)}});
  });
}

Operand Dataflow::ReadOperand(const Step& step, Place place, int rank, int64_t elems, DType dtype,
                              const Actor& actor) {
  std::vector<Portion> portions;
  Read(step, place, rank, elems * Item(dtype), actor, &portions);
  return Operand(place, rank, dtype, std::move(portions));
}

void Dataflow::Cast(const Step& step, const CastPiece& piece, const Actor& actor) {
  Operand source = ReadOperand(step, model_.place(step, piece.src), step.rank, piece.elems,
                               piece.src_dtype, actor);
  Combine(step, piece.dst, piece.dst_dtype, piece.elems, {std::move(source)}, actor);
}

// As where every byte differs: then it does all that it may do, and what races with its reads of
// dst races with its writes. Where nothing differs its result is what was there, the same at all
// ranks.
void Dataflow::Refresh(const Step& step, const CastPiece& piece, const Actor& actor) {
  const Place dst = model_.place(step, piece.dst);
  const int64_t bytes = piece.elems * Item(piece.dst_dtype);
  if (bytes == 0) return;
  if (!Predecessor(step)) CheckAlike(step, dst, bytes);
  Cast(step, piece, actor);
}

void Dataflow::CheckAlike(const Step& step, Place place, int64_t bytes) {
  const auto peek = [&](int rank) {
    scratch_.clear();
    At(place.object, rank).Peek(place.offset, place.offset + bytes, &scratch_);
    std::vector<Portion> joined;
    for (const Portion& portion : scratch_) Append(portion, &joined);
    return joined;
  };
  const auto own = peek(step.rank);
  for (const int target : Targets(step)) {
    const auto there = peek(target);
    if (there == own && own[0].value.expr != kStaleExpr) continue;
    Wrong(step, place, target, bytes,
          fmt::format("expected what the last all-gather has brought to all ranks; begins with {}, "
                      "and at rank {} with {}",
                      expressions_.ToString(there[0].value), step.rank,
                      expressions_.ToString(own[0].value)));
  }
}

void Dataflow::Sum(const Step& step, const SumPiece& piece, const Actor& actor) {
  std::vector<Operand> operands;
  operands.reserve(piece.sources.size());
  for (const Ref& source : piece.sources) {
    operands.push_back(ReadOperand(step, model_.place(step, source), step.rank, piece.elems,
                                   piece.src_dtype, actor));
  }
  Combine(step, piece.dst, piece.dst_dtype, piece.elems, std::move(operands), actor);
}

void Dataflow::Land(const Step& step, const LandPiece& piece, const Actor& actor) {
  const Topology& topology = model_.input().topology;
  const Place block = model_.place(step, piece.block);
  std::vector<int> order = piece.locals;
  for (int local = 0; local < topology.local_ranks; ++local) {
    if (std::find(order.begin(), order.end(), local) == order.end()) order.push_back(local);
  }
  std::vector<Operand> operands;
  for (size_t i = 0; i < order.size(); ++i) {
    const int rank = topology.Rank(topology.Node(step.rank), order[i]);
    operands.push_back(ReadOperand(step, block, rank, piece.elems, DType::kF32, actor));
    if (i >= piece.locals.size()) operands.back().MustBeZero();
  }
  Combine(step, piece.dst, piece.dst_dtype, piece.elems, std::move(operands), actor);
}

void Dataflow::Combine(const Step& step, Ref dst, DType dst_dtype, int64_t elems,
                       std::vector<Operand> operands, const Actor& actor) {
  const Place to = model_.place(step, dst);
  std::vector<Portion> result;
  if (!Predecessor(step) && elems > 0) {
    if (step.op->accumulate) {
      std::vector<Portion> old;
      At(to.object, step.rank).Peek(to.offset, to.offset + elems * Item(dst_dtype), &old);
      operands.emplace_back(to, step.rank, dst_dtype, std::move(old));
    }
    for (int64_t left = elems; left > 0;) {
      int64_t run = left;
      for (const Operand& operand : operands) run = std::min(run, operand.elems());
      const Operand* old = step.op->accumulate ? &operands.back() : nullptr;
      // An interval that ends inside an element: whatever it is, it is not one.
      const ExprId exact = run > 0 ? Add(step, operands, old) : kWrongExpr;
      const ExprId expr = expressions_.Round(exact, dst_dtype);
      if (run == 0) {
        Wrong(step, operands[0].position(), operands[0].rank(), Item(operands[0].dtype()),
              "operands are cut inside an element");
        result.push_back({left * Item(dst_dtype), Uniform(kWrongExpr)});
        break;
      }
      Value value = Uniform(expr);
      if (!value.uniform()) {
        const Value first = operands[0].front();
        value = {expr, first.param, first.origin / Item(first.dtype) * Item(dst_dtype), dst_dtype};
      }
      Append({run * Item(dst_dtype), value}, &result);
      for (Operand& operand : operands) operand.Take(run);
      left -= run;
    }
  }
  WriteTargets(step, to, elems * Item(dst_dtype), actor, result);
}

ExprId Dataflow::Add(const Step& step, const std::vector<Operand>& operands, const Operand* old) {
  const Value first = operands[0].front();
  std::vector<ExprId> terms;
  for (const Operand& operand : operands) {
    const Value value = operand.front();
    if (value.expr == kWrongExpr) return kWrongExpr;
    std::string expected;
    if (operand.must_be_zero()) {
      if (value.expr == kZeroExpr) continue;
      expected = "zero in the block of a rank that is not listed";
    } else if (value.uniform() || !operand.aligned()) {
      expected = fmt::format("elements of type {}", tide::Name(operand.dtype()));
    } else if (value.param != first.param ||
               value.origin / Item(operand.dtype()) != first.origin / Item(operands[0].dtype())) {
      expected =
          fmt::format("the same element as the first operand, {}", expressions_.ToString(first));
    }
    if (!expected.empty()) {
      Wrong(step, operand.position(), operand.rank(), Item(operand.dtype()),
            fmt::format("operand {}: expected {}, holds {}", &operand - operands.data(), expected,
                        expressions_.ToString(value)));
      return kWrongExpr;
    }
    if (&operand != old) terms.push_back(value.expr);
  }
  const Operation& op = *step.op;
  ExprId expr = expressions_.Sum(step.rank, std::move(terms));
  if (op.scaled || op.kind == OpKind::kLand) expr = expressions_.Scale(expr);
  return old != nullptr ? expressions_.Add(old->front().expr, expr) : expr;
}

void Dataflow::CallerWrite(const Step& step, const Actor& actor) {
  for (const Content& content : step.caller->contents(step.rank)) {
    Write(step, content.place, step.rank, content.bytes, actor,
          {{content.bytes, contract_.ValueOf(content)}});
  }
}

void Dataflow::CallerRead(const Step& step, const Actor& actor) {
  for (const Content& content : step.caller->contents(step.rank)) {
    scratch_.clear();
    Read(step, content.place, step.rank, content.bytes, actor, &scratch_);
    int64_t offset = 0;
    for (const Portion& portion : scratch_) {
      if (portion.value.expr != kWrongExpr) {
        std::string mismatch = contract_.Mismatch(content, offset, portion.value);
        if (!mismatch.empty()) {
          Wrong(step, {content.place.object, content.place.offset + offset}, step.rank,
                portion.bytes, std::move(mismatch));
        }
      }
      offset += portion.bytes;
    }
  }
}

void Dataflow::Wrong(const Step& step, Place place, int rank, int64_t bytes, std::string detail) {
  if (reported_ == &step) return;
  reported_ = &step;
  Finding finding;
  finding.kind = FindingKind::kWrongValue;
  finding.first = model_.SiteOf(step);
  finding.region = model_.MemoryName(model_.memory(place.object, rank));
  finding.begin = place.offset;
  finding.end = place.offset + bytes;
  finding.detail = std::move(detail);
  findings_.Add(std::move(finding));
}

}  // namespace tide::verify
