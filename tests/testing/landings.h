// Landings as the tests of all-gathers see them: shards, what must land, and canaries around it.
#ifndef TIDE_TESTS_TESTING_LANDINGS_H_
#define TIDE_TESTS_TESTING_LANDINGS_H_

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "testing/cases.h"
#include "tide/communicator.h"

namespace tide::testing {

inline constexpr char kCanary = 0x5a;

// Canaries before and after a landing; node-shared landings start at a page.
inline int64_t CanaryBytes() { return sysconf(_SC_PAGESIZE); }

// Shards of this type, but of bytes where the parameter is bytes.
inline std::vector<DType> ShardDtypes(const GroupLayout& layout, DType dtype) {
  std::vector<DType> dtypes;
  for (const ParamLayout& param : layout.params()) {
    dtypes.push_back(param.shape.dtype == DType::kU8 ? DType::kU8 : dtype);
  }
  return dtypes;
}

// One rank's padded shard of every parameter; the same seed gives the same bytes on all ranks.
inline std::vector<std::vector<char>> Shards(const GroupLayout& layout, DType dtype, int rank,
                                             unsigned seed) {
  std::vector<std::vector<char>> shards;
  std::mt19937 random(seed + static_cast<unsigned>(rank));
  const auto dtypes = ShardDtypes(layout, dtype);
  for (size_t p = 0; p < dtypes.size(); ++p) {
    shards.push_back(RandomValues(random, dtypes[p], layout.params()[p].shard_elems));
  }
  return shards;
}

// The same after a step that has changed an element here and there, on some ranks.
inline std::vector<std::vector<char>> ChangedShards(const GroupLayout& layout, DType dtype,
                                                    int rank, unsigned seed) {
  auto shards = Shards(layout, dtype, rank, seed);
  if (rank % 3 == 1) return shards;
  const auto others = Shards(layout, dtype, rank, seed + 1000);
  const auto dtypes = ShardDtypes(layout, dtype);
  for (size_t p = 0; p < dtypes.size(); ++p) {
    const size_t item = ItemSize(dtypes[p]);
    for (size_t i = p % 5; i < shards[p].size() / item; i += 1 + (i * 7 + p) % 29) {
      std::copy_n(others[p].begin() + static_cast<std::ptrdiff_t>(i * item), item,
                  shards[p].begin() + static_cast<std::ptrdiff_t>(i * item));
    }
  }
  return shards;
}

template <typename Buffers>
std::vector<const void*> Pointers(const Buffers& buffers) {
  std::vector<const void*> pointers;
  // A vector without elements may have no address; the call wants one for buffers of 0 bytes, too.
  for (const auto& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

inline std::vector<char> CastToBF16(const std::vector<char>& values, DType dtype) {
  std::vector<char> cast(values.size() / ItemSize(dtype) * ItemSize(DType::kBF16));
  for (size_t i = 0; i < values.size() / ItemSize(dtype); ++i) {
    const uint16_t bits = FloatToBF16(ValueAt(values, dtype, static_cast<int64_t>(i)));
    std::memcpy(cast.data() + i * sizeof bits, &bits, sizeof bits);
  }
  return cast;
}

// Gathers the shards of `seed` into the segment, behind its first canary.
inline void Gather(Communicator& comm, int group, const SegmentView& segment, unsigned seed,
                   DType shard_dtype) {
  const auto shards = Shards(comm.layout(group), shard_dtype, comm.rank(), seed);
  comm.AllGather({group,
                  Pointers(shards),
                  ShardDtypes(comm.layout(group), shard_dtype),
                  {segment.id, CanaryBytes()}});
}

// Brings what has changed in the shards since Gather.
inline void Refresh(Communicator& comm, int group, const SegmentView& segment, unsigned seed,
                    DType shard_dtype) {
  const auto shards = ChangedShards(comm.layout(group), shard_dtype, comm.rank(), seed);
  AllGatherCall call{group,
                     Pointers(shards),
                     ShardDtypes(comm.layout(group), shard_dtype),
                     {segment.id, CanaryBytes()}};
  call.refresh = true;
  comm.AllGather(call);
}

// The same with shards that need no cast.
inline void Gather(Communicator& comm, int group, const SegmentView& segment, unsigned seed) {
  const auto& params = comm.layout(group).params();
  Gather(comm, group, segment, seed, params.empty() ? DType::kF32 : params[0].shape.dtype);
}

// All bytes of the segment after an all-gather of shards(rank).
inline std::vector<char> Landed(
    const GroupLayout& layout, DType shard_dtype, const SegmentView& segment,
    const std::function<std::vector<std::vector<char>>(int rank)>& shards) {
  std::vector<char> expected(static_cast<size_t>(segment.bytes), kCanary);
  const auto dtypes = ShardDtypes(layout, shard_dtype);
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto theirs = shards(rank);
    for (size_t p = 0; p < theirs.size(); ++p) {
      const bool same = layout.params()[p].shape.dtype == dtypes[p];
      const auto landed = same ? theirs[p] : CastToBF16(theirs[p], shard_dtype);
      const int64_t at = CanaryBytes() + layout.LandingOffset(static_cast<int>(p), rank);
      std::copy(landed.begin(), landed.end(), expected.begin() + at);
    }
  }
  return expected;
}

// All bytes of the segment after Gather.
inline std::vector<char> Gathered(const GroupLayout& layout, DType shard_dtype,
                                  const SegmentView& segment, unsigned seed) {
  return Landed(layout, shard_dtype, segment,
                [&](int rank) { return Shards(layout, shard_dtype, rank, seed); });
}

// And after Refresh of what Gather has brought.
inline std::vector<char> Refreshed(const GroupLayout& layout, DType shard_dtype,
                                   const SegmentView& segment, unsigned seed) {
  return Landed(layout, shard_dtype, segment,
                [&](int rank) { return ChangedShards(layout, shard_dtype, rank, seed); });
}

// A segment for one landing of the group, with all bytes set to the canary on all ranks. That takes
// an all-gather: what a rank writes by itself into a node-shared segment only that rank sees.
inline SegmentView AddLanding(Communicator& comm, int group, SegmentKind kind) {
  const auto ranks = comm.topology().Ranks();
  const int64_t bytes =
      AlignUp(comm.layout(group).landing_bytes() + 2 * CanaryBytes(), 256 * int64_t{ranks});
  const SegmentView segment = comm.AddSegment(bytes, "landing", kind);
  const int fill = comm.RegisterGroup("canary", {{"canary", bytes, 1, DType::kU8}});
  const std::vector<char> part(static_cast<size_t>(bytes / ranks), kCanary);
  comm.AllGather({fill, {part.data()}, {DType::kU8}, {segment.id, 0}});
  return segment;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_LANDINGS_H_
