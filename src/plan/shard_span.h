// The packed shard of a reduce-scatter call as one line of elements, and cuts of it.
//
// Participants follow one another, each from a multiple of kSpanAlignment on. Sub-slices, passes,
// blocks and chunks are all cuts of this line; they depend on layout and participants alone, never
// on the rank, so that everyone who fills and everyone who reads agree. Offsets are those of a full
// shard; rows past D_p are simply not sent.
#ifndef TIDE_PLAN_SHARD_SPAN_H_
#define TIDE_PLAN_SHARD_SPAN_H_

#include <cstdint>
#include <vector>

#include "tide/layout.h"
#include "tide/plan.h"

namespace tide::internal {

// Elements: 64 bytes of the narrowest gradient.
inline constexpr int64_t kSpanAlignment = 32;

// Elements [first_elem, first_elem + elems) of one participant's shard, which stand at `position`
// of the line.
struct SpanRun {
  int participant = 0;  // index into spec.params
  int64_t first_elem = 0;
  int64_t elems = 0;
  int64_t position = 0;
};

// A part of the line, [begin, end).
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t length() const { return end - begin; }
};

// A run and where it is staged: `rows` rows of it, `stride` bytes apart.
struct StagedRun {
  SpanRun run;
  int64_t slot_offset = 0;
  int64_t stride = 0;
};
using Chunk = std::vector<StagedRun>;

class ShardSpan {
 public:
  // Throws Error(kInvalidArgument) for unknown parameters, u8, or counts that differ.
  ShardSpan(const GroupLayout& layout, const ReduceScatterSpec& spec);

  int64_t elems() const { return elems_; }
  int participants() const { return static_cast<int>(positions_.size()); }
  const ParamLayout& param(int participant) const;
  DType dtype(int participant) const { return spec_.grad_dtypes[static_cast<size_t>(participant)]; }
  int64_t item(int participant) const { return static_cast<int64_t>(ItemSize(dtype(participant))); }
  // Whether all gradients have one dtype; it, or else fp32.
  bool uniform() const;
  DType common_dtype() const;

  std::vector<SpanRun> Runs(Interval interval) const;
  // Elements of the run that `rank` really owns, from its first on.
  int64_t LiveElems(const SpanRun& run, int rank) const;
  // Bytes that the shards of one rank take when staged whole: one row of every run.
  int64_t StagedBytes() const;
  // Covers `rows` rows of the interval once, in order; every chunk fits a slot (slot_bytes <= 0: no
  // bound). At least one chunk. Throws Error(kInvalidArgument) if a slot can't hold a cache line of
  // each row.
  std::vector<Chunk> CutIntoChunks(Interval interval, int rows,
                                   const StagingOptions& staging) const;

 private:
  const GroupLayout& layout_;
  const ReduceScatterSpec& spec_;
  std::vector<int64_t> positions_;
  int64_t elems_ = 0;
};

}  // namespace tide::internal

#endif  // TIDE_PLAN_SHARD_SPAN_H_
