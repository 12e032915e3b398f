// The tables and the cutting into tiles, as kernels read them. No GPU is needed.
#include "kernels/cuda/table.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "tide/error.h"

namespace tide::kernels::cuda::internal {
namespace {

TEST(CutTile, CoversEveryElementOnceInAlignedGroups) {
  constexpr int64_t kTile = 16;
  for (int64_t elems = 1; elems <= 70; ++elems) {
    for (int64_t head = kNeverAligned; head < kGroupElems; ++head) {
      SCOPED_TRACE("elems " + std::to_string(elems) + ", head " + std::to_string(head));
      const int64_t n_tiles = (elems + kTile - 1) / kTile;
      int64_t next = 0, in_bodies = 0;
      for (int64_t index = 0; index < n_tiles; ++index) {
        const Tile tile = CutTile(elems, index, kTile, head);
        ASSERT_EQ(tile.begin, next);
        ASSERT_LE(tile.begin, tile.body_begin);
        ASSERT_LE(tile.body_begin, tile.body_end);
        ASSERT_LE(tile.body_end, tile.end);
        const int64_t body = tile.body_end - tile.body_begin;
        ASSERT_EQ(body % kGroupElems, 0);
        ASSERT_LE(body, kTile);
        if (body > 0) {
          ASSERT_EQ((tile.body_begin - head) % kGroupElems, 0);
        }
        in_bodies += body;
        next = tile.end;
      }
      ASSERT_EQ(next, elems);
      const int64_t whole = head == kNeverAligned || elems < head ? 0 : (elems - head) / 8 * 8;
      ASSERT_EQ(in_bodies, whole);
    }
  }
}

TEST(CutTile, FirstAlignedIsTheFirst) {
  for (const int64_t elem_bytes : {1, 2, 4}) {
    for (uint64_t address = 4096; address < 4096 + 32; address += elem_bytes) {
      int64_t want = 0;
      while (!AlignedAt(address, elem_bytes, want)) ++want;
      EXPECT_EQ(FirstAligned(address, elem_bytes), want) << address << " of " << elem_bytes;
    }
  }
}

template <class Row>
Row ReadRow(const Table& table, size_t at, size_t index) {
  Row row;
  std::memcpy(&row, table.bytes.data() + at + index * sizeof(Row), sizeof(Row));
  return row;
}

constexpr int64_t kTile = TileElems(DType::kBF16);

SumItem MakeItem(int dst, std::vector<int> sources, int64_t elems) {
  SumItem item{.dst = {dst, 16 * dst}, .elems = elems, .src_dtype = DType::kBF16};
  for (const int source : sources) item.sources.push_back({source, 2 * source});
  return item;
}

// Follows every tile of every part back to the items that were asked for.
void ExpectTable(const std::vector<SumItem>& items, size_t max_bases, size_t n_parts) {
  const Table table = MakeTable(items, max_bases);
  ASSERT_EQ(table.parts.size(), n_parts);
  size_t item = 0;
  for (const Part& part : table.parts) {
    ASSERT_LE(part.bases.size(), max_bases);
    ASSERT_EQ(part.bases.size(), part.alignments.size());
    for (int64_t tile = 0; tile < part.n_tiles;) {
      while (items[item].elems == 0) ++item;
      const SumItem& want = items[item];
      const auto index = ReadRow<uint32_t>(table, part.tile_items_at, static_cast<size_t>(tile));
      const auto row = ReadRow<TableItem>(table, part.items_at, index);
      ASSERT_EQ(row.elems, want.elems);
      ASSERT_EQ(row.first_tile, tile);
      ASSERT_EQ(row.n_sources, want.sources.size());
      ASSERT_EQ(row.dst_dtype, want.dst_dtype);
      ASSERT_EQ(row.src_dtype, want.src_dtype);
      for (size_t k = 0; k <= want.sources.size(); ++k) {
        const auto got = ReadRow<TableOperand>(table, part.operands_at, row.first_operand + k);
        const Operand& operand = k == 0 ? want.dst : want.sources[k - 1];
        ASSERT_LT(got.base, part.bases.size());
        ASSERT_EQ(part.bases[got.base], operand.base);
        ASSERT_EQ(got.offset, operand.offset);
        ASSERT_GE(part.alignments[got.base], ItemSize(k == 0 ? want.dst_dtype : want.src_dtype));
      }
      const int64_t n_tiles = (want.elems + kTile - 1) / kTile;
      for (int64_t k = 0; k < n_tiles; ++k, ++tile) {
        ASSERT_EQ(ReadRow<uint32_t>(table, part.tile_items_at, static_cast<size_t>(tile)), index);
      }
      ++item;
    }
  }
  while (item < items.size() && items[item].elems == 0) ++item;
  EXPECT_EQ(item, items.size());
}

TEST(MakeTable, ListsEveryTile) {
  ExpectTable({}, 10, 0);
  ExpectTable({MakeItem(0, {1}, 0)}, 10, 0);
  ExpectTable({MakeItem(0, {1, 2}, kTile), MakeItem(3, {1, 2}, kTile + 1), MakeItem(4, {4}, 0),
               MakeItem(5, {0, 5, 1}, 1)},
              10, 1);
}

TEST(MakeTable, SplitsWhereBasesRunOut) {
  std::vector<SumItem> items;
  for (int i = 0; i < 10; ++i) items.push_back(MakeItem(3 * i, {3 * i + 1, 3 * i + 2}, 100 + i));
  ExpectTable(items, 30, 1);
  ExpectTable(items, 29, 2);
  ExpectTable(items, 9, 4);
  ExpectTable(items, 3, 10);
  // Shared bases count once.
  for (SumItem& item : items) item.dst.base = 0;
  ExpectTable(items, 21, 1);
  ExpectTable(items, 20, 2);
}

TEST(MakeTable, RefusesWhatNoKernelCanRun) {
  EXPECT_THROW(MakeTable({MakeItem(0, {1, 2}, 5)}, 2), Error);
  EXPECT_THROW(MakeTable({MakeItem(-1, {1}, 5)}), Error);
  EXPECT_THROW(MakeTable({MakeItem(0, {1}, -5)}), Error);
  SumItem odd = MakeItem(0, {1}, 5);
  odd.sources[0].offset = 3;
  EXPECT_THROW(MakeTable({odd}), Error);
  odd = MakeItem(0, {1}, 5);
  odd.dst.offset = 2;  // fp32
  EXPECT_THROW(MakeTable({odd}), Error);
}

}  // namespace
}  // namespace tide::kernels::cuda::internal
