#include "plan/shard_span.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "tide/error.h"

namespace tide::internal {
namespace {

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

}  // namespace

ShardSpan::ShardSpan(const GroupLayout& layout, const ReduceScatterSpec& spec)
    : layout_(layout), spec_(spec) {
  CheckSpec(layout, spec);
  for (size_t i = 0; i < spec.params.size(); ++i) {
    positions_.push_back(elems_);
    elems_ += AlignUp(param(static_cast<int>(i)).shard_elems, kSpanAlignment);
  }
}

const ParamLayout& ShardSpan::param(int participant) const {
  return layout_.params()[static_cast<size_t>(spec_.params[static_cast<size_t>(participant)])];
}

bool ShardSpan::uniform() const {
  const auto& dtypes = spec_.grad_dtypes;
  return std::adjacent_find(dtypes.begin(), dtypes.end(), std::not_equal_to<>()) == dtypes.end();
}

DType ShardSpan::common_dtype() const {
  return uniform() && !spec_.grad_dtypes.empty() ? spec_.grad_dtypes[0] : DType::kF32;
}

std::vector<SpanRun> ShardSpan::Runs(Interval interval) const {
  std::vector<SpanRun> runs;
  // The last participant that starts at or before the interval, then its successors.
  auto at = std::upper_bound(positions_.begin(), positions_.end(), interval.begin);
  if (at != positions_.begin()) --at;
  for (; at != positions_.end() && *at < interval.end; ++at) {
    const auto participant = static_cast<int>(at - positions_.begin());
    const int64_t first = std::max(interval.begin - *at, int64_t{0});
    const int64_t last = std::min(interval.end - *at, param(participant).shard_elems);
    if (last > first) runs.push_back({participant, first, last - first, *at + first});
  }
  return runs;
}

int64_t ShardSpan::LiveElems(const SpanRun& run, int rank) const {
  const int64_t live = layout_.LiveElems(spec_.params[static_cast<size_t>(run.participant)], rank);
  return std::clamp<int64_t>(live - run.first_elem, 0, run.elems);
}

int64_t ShardSpan::StagedBytes() const {
  int64_t bytes = 0;
  for (int i = 0; i < participants(); ++i) {
    bytes += AlignUp(param(i).shard_elems * item(i), kStagingAlignment);
  }
  return bytes;
}

std::vector<Chunk> ShardSpan::CutIntoChunks(Interval interval, int rows,
                                            const StagingOptions& staging) const {
  const int64_t slot_bytes = staging.slot_bytes;
  const int64_t slot = slot_bytes > 0 ? slot_bytes / kStagingAlignment * kStagingAlignment
                                      : std::numeric_limits<int64_t>::max();
  if (slot < rows * kStagingAlignment) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("staging slot: expected at least {} bytes, {} for each of {} rows, "
                            "got {}",
                            rows * kStagingAlignment, kStagingAlignment, rows, slot_bytes));
  }
  const std::vector<SpanRun> runs = Runs(interval);
  int64_t ahead = 0;  // bytes that are not cut yet
  for (const SpanRun& run : runs) {
    ahead += rows * AlignUp(run.elems * item(run.participant), kStagingAlignment);
  }
  const auto capacity_now = [&] {
    if (staging.taper_bytes <= 0) return slot;
    const int64_t least = std::max(staging.taper_bytes, rows * kStagingAlignment);
    return std::min(slot, AlignUp(std::max(ahead / 2, least), kStagingAlignment));
  };
  std::vector<Chunk> chunks(1);
  int64_t used = 0;
  int64_t capacity = capacity_now();
  for (const SpanRun& whole : runs) {
    const int64_t width = item(whole.participant);
    for (SpanRun left = whole; left.elems > 0;) {
      const int64_t room = (capacity - used) / rows / kStagingAlignment * kStagingAlignment;
      if (room == 0) {
        chunks.emplace_back();
        used = 0;
        capacity = capacity_now();
        continue;
      }
      SpanRun run = left;
      run.elems = std::min(left.elems, room / width);
      const int64_t stride = AlignUp(run.elems * width, kStagingAlignment);
      chunks.back().push_back({run, used, stride});
      used += rows * stride;
      ahead -= rows * stride;
      left.first_elem += run.elems;
      left.position += run.elems;
      left.elems -= run.elems;
    }
  }
  return chunks;
}

}  // namespace tide::internal
