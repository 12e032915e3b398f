#include "plan/staging.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "tide/error.h"

namespace tide {
namespace internal {

std::vector<Chunk> CutIntoChunks(const GroupLayout& layout, const ReduceScatterSpec& spec,
                                 int64_t slot_bytes) {
  const int64_t capacity = slot_bytes > 0 ? slot_bytes / kStagingAlignment * kStagingAlignment
                                          : std::numeric_limits<int64_t>::max();
  if (capacity < kStagingAlignment) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("staging slot: expected at least {} bytes, got {}", kStagingAlignment,
                            slot_bytes));
  }
  std::vector<Chunk> chunks(1);
  int64_t used = 0;
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const int64_t elems = layout.params()[static_cast<size_t>(spec.params[i])].shard_elems;
    const auto item = static_cast<int64_t>(ItemSize(spec.grad_dtypes[i]));
    for (int64_t first = 0; first < elems;) {
      if (used == capacity) {
        chunks.emplace_back();
        used = 0;
      }
      const int64_t run = std::min(elems - first, (capacity - used) / item);
      chunks.back().push_back({static_cast<int>(i), first, run, used});
      used = AlignUp(used + run * item, kStagingAlignment);
      first += run;
    }
  }
  return chunks;
}

}  // namespace internal

int64_t StagedBytes(const GroupLayout& layout, const ReduceScatterSpec& spec) {
  int64_t bytes = 0;
  for (size_t i = 0; i < spec.params.size(); ++i) {
    bytes += AlignUp(layout.params()[static_cast<size_t>(spec.params[i])].shard_elems *
                         static_cast<int64_t>(ItemSize(spec.grad_dtypes[i])),
                     kStagingAlignment);
  }
  return bytes;
}

int64_t StagingRegionBytes(const Topology& topology, const StagingOptions& staging) {
  return (topology.local_ranks - 1) * staging.slots * staging.slot_bytes;
}

}  // namespace tide
