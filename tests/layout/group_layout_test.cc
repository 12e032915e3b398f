#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "tide/error.h"
#include "tide/layout.h"

namespace tide {
namespace {

// torch.chunk(D, N): front ranks get ceil(D/N) rows until the rows run out.
std::vector<int64_t> TorchChunkRows(int64_t rows, int ranks) {
  std::vector<int64_t> owned(static_cast<size_t>(ranks), 0);
  const int64_t chunk = (rows + ranks - 1) / ranks;
  for (int64_t& mine : owned) {
    mine = std::min(chunk, rows);
    rows -= mine;
  }
  return owned;
}

TEST(GroupLayout, RowsFollowTorchChunk) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (int64_t rows = 0; rows <= 40; ++rows) {
      const GroupLayout layout("g", {{"p", rows, 3, DType::kBF16}}, ranks);
      const auto expected = TorchChunkRows(rows, ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(layout.LiveRows(0, rank), expected[static_cast<size_t>(rank)])
            << rows << " over " << ranks;
      }
    }
  }
}

TEST(GroupLayout, LandingsAreAlignedAndDisjoint) {
  const std::vector<ParamShape> shapes = {{"a", 5, 3, DType::kBF16},
                                          {"b", 0, 4, DType::kF32},
                                          {"c", 1, 1, DType::kU8},
                                          {"d", 9, 7, DType::kF32}};
  for (int ranks = 1; ranks <= 9; ++ranks) {
    const GroupLayout layout("g", shapes, ranks);
    int64_t end = 0;
    for (size_t p = 0; p < shapes.size(); ++p) {
      const ParamLayout& param = layout.params()[p];
      EXPECT_EQ(param.landing_offset % kLandingAlignment, 0);
      EXPECT_GE(param.landing_offset, end);
      // Rank r's shard follows rank r-1's: the unsharded parameter is a prefix of the landing.
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(layout.LandingOffset(static_cast<int>(p), rank),
                  param.landing_offset + rank * param.shard_bytes);
      }
      end = param.landing_offset + ranks * param.shard_bytes;
    }
    EXPECT_GE(layout.landing_bytes(), end);
  }
}

TEST(GroupLayout, RefusesNonsense) {
  EXPECT_THROW(GroupLayout("g", {{"p", -1, 3, DType::kF32}}, 2), Error);
  EXPECT_THROW(GroupLayout("g", {{"p", 1, -3, DType::kF32}}, 2), Error);
  EXPECT_THROW(GroupLayout("g", {}, 0), Error);
}

TEST(GroupLayout, RefusesSizesThatOverflow) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const int64_t large = int64_t{1} << 40;
  for (const auto& [rows, row_elems] : std::vector<std::pair<int64_t, int64_t>>{
           {kMost, kMost}, {kMost, 1}, {1, kMost}, {kMost, 0}, {large, large}, {large, 1 << 22}}) {
    EXPECT_THROW(GroupLayout("g", {{"p", rows, row_elems, DType::kF32}}, 2), Error)
        << rows << " x " << row_elems;
  }
  const ParamShape half{"p", large, 1 << 15, DType::kU8};  // 2^55 bytes
  EXPECT_NO_THROW(GroupLayout("g", {half}, 2));
  EXPECT_THROW(GroupLayout("g", {half, half, half}, 2), Error);
}

}  // namespace
}  // namespace tide
