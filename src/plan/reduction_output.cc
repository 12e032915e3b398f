#include "plan/reduction_output.h"

#include <utility>

namespace tide::internal {

ReductionOutput::ReductionOutput(Builder* builder, const ShardSpan& span,
                                 const ReduceScatterSpec& spec, bool accumulator)
    : builder_(*builder), span_(span), spec_(spec) {
  int64_t elems = 0;
  for (int i = 0; i < span.participants(); ++i) {
    first_elems_.push_back(elems);
    elems += span.param(i).shard_elems;
  }
  output_ = builder_.AddBuffer(BufferKind::kOutput, 0,
                               elems * static_cast<int64_t>(ItemSize(spec.output_dtype)));
  if (accumulator) {
    accumulator_ = builder_.AddBuffer(BufferKind::kAccumulator, 0,
                                      elems * static_cast<int64_t>(ItemSize(DType::kF32)));
  }
}

int64_t ReductionOutput::Elem(const SpanRun& run) const {
  return first_elems_[static_cast<size_t>(run.participant)] + run.first_elem;
}

Ref ReductionOutput::At(const SpanRun& run) const {
  return {accumulator_ >= 0 ? accumulator_ : output_,
          Elem(run) * static_cast<int64_t>(ItemSize(dtype()))};
}

std::vector<SpanRun> ReductionOutput::Live() const {
  std::vector<SpanRun> runs;
  for (SpanRun run : span_.Runs({0, span_.elems()})) {
    run.elems = span_.LiveElems(run, builder_.rank());
    if (run.elems > 0) runs.push_back(run);
  }
  return runs;
}

void ReductionOutput::Begin(int queue) {
  if (accumulator_ < 0 || !spec_.accumulate) return;
  std::vector<CastPiece> casts;
  const auto item = static_cast<int64_t>(ItemSize(spec_.output_dtype));
  for (const SpanRun& run : Live()) {
    casts.push_back(
        {At(run), {output_, Elem(run) * item}, run.elems, DType::kF32, spec_.output_dtype});
  }
  if (casts.empty()) return;
  builder_.Await(queue, {EventKind::kReady});
  builder_.Add(queue, OpKind::kCast).casts = std::move(casts);
}

void ReductionOutput::End(int queue) {
  if (accumulator_ >= 0) {
    std::vector<CastPiece> casts;
    const auto item = static_cast<int64_t>(ItemSize(spec_.output_dtype));
    for (const SpanRun& run : Live()) {
      casts.push_back(
          {{output_, Elem(run) * item}, At(run), run.elems, spec_.output_dtype, DType::kF32});
    }
    if (!casts.empty()) builder_.Add(queue, OpKind::kCast).casts = std::move(casts);
  }
  if (!spec_.accumulate) ZeroPadding(queue);
}

void ReductionOutput::ZeroPadding(int queue) {
  const auto item = static_cast<int64_t>(ItemSize(spec_.output_dtype));
  std::vector<Piece> pieces;
  for (const SpanRun& run : span_.Runs({0, span_.elems()})) {
    const int64_t live = span_.LiveElems(run, builder_.rank());
    if (live == run.elems) continue;
    const Ref dst{output_, (Elem(run) + live) * item};
    pieces.push_back({dst, dst, (run.elems - live) * item});
  }
  if (!pieces.empty()) builder_.Add(queue, OpKind::kZero).pieces = std::move(pieces);
}

}  // namespace tide::internal
