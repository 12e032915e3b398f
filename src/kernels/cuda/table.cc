#include "kernels/cuda/table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <unordered_map>

#include "tide/error.h"

namespace tide::kernels::cuda::internal {
namespace {

void CheckOperand(const Operand& operand, int64_t elem_bytes) {
  if (operand.base < 0 || operand.offset % elem_bytes != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "an operand is a base pointer and a multiple of the element's " +
                    std::to_string(elem_bytes) + " bytes, got base " +
                    std::to_string(operand.base) + ", offset " + std::to_string(operand.offset));
  }
}

void CheckItem(const SumItem& item) {
  if (item.elems < 0 || item.sources.size() > std::numeric_limits<uint16_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                "an item has at least 0 elements and at most 65535 sources, got " +
                    std::to_string(item.elems) + " and " + std::to_string(item.sources.size()));
  }
  CheckOperand(item.dst, Bytes(item.dst_dtype));
  for (const Operand& source : item.sources) CheckOperand(source, Bytes(item.src_dtype));
  for (const Operand& copy : item.copies) {
    CheckOperand(copy, Bytes(item.dst_dtype));
    if ((copy.offset - item.dst.offset) % kVectorBytes == 0) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "a copy is as aligned as dst, to " + std::to_string(kVectorBytes) +
                    " bytes; got offsets " + std::to_string(copy.offset) + " and " +
                    std::to_string(item.dst.offset));
  }
}

// Collects the items of one launch.
class PartBuilder {
 public:
  explicit PartBuilder(size_t max_bases) : max_bases_(max_bases) {}

  bool empty() const { return items_.empty(); }

  // False, and nothing is added, if the bases of the item do not fit any more.
  bool Add(const SumItem& item) {
    const size_t n_bases = part_.bases.size();
    std::vector<TableOperand> added;
    added.push_back(MakeOperand(item.dst));
    for (const Operand& source : item.sources) added.push_back(MakeOperand(source));
    for (const Operand& copy : item.copies) added.push_back(MakeOperand(copy));
    if (part_.bases.size() > max_bases_) {
      for (size_t slot = n_bases; slot < part_.bases.size(); ++slot)
        slots_.erase(part_.bases[slot]);
      part_.bases.resize(n_bases);
      part_.alignments.resize(n_bases);
      return false;
    }
    Align(item, added);
    items_.push_back({item.elems, part_.n_tiles, static_cast<uint32_t>(operands_.size()),
                      static_cast<uint32_t>(item.copies.size()),
                      static_cast<uint16_t>(item.sources.size()), item.dst_dtype, item.src_dtype});
    operands_.insert(operands_.end(), added.begin(), added.end());
    const int64_t n_tiles = TileCount(item.elems, item.src_dtype);
    tile_items_.insert(tile_items_.end(), static_cast<size_t>(n_tiles),
                       static_cast<uint32_t>(items_.size() - 1));
    part_.n_tiles += n_tiles;
    return true;
  }

  void MoveTo(Table& table) {
    part_.items_at = Append(table.bytes, items_);
    part_.operands_at = Append(table.bytes, operands_);
    part_.tile_items_at = Append(table.bytes, tile_items_);
    table.parts.push_back(std::move(part_));
  }

 private:
  TableOperand MakeOperand(const Operand& operand) {
    const auto [at, fresh] =
        slots_.try_emplace(operand.base, static_cast<uint32_t>(part_.bases.size()));
    if (fresh) {
      part_.bases.push_back(operand.base);
      part_.alignments.push_back(1);
    }
    return {operand.offset, at->second, 0};
  }

  void Align(const SumItem& item, const std::vector<TableOperand>& operands) {
    for (size_t i = 0; i < operands.size(); ++i) {
      const bool source = i > 0 && i <= item.sources.size();
      size_t& alignment = part_.alignments[operands[i].base];
      alignment = std::max(alignment, ItemSize(source ? item.src_dtype : item.dst_dtype));
    }
  }

  // Each table starts at a multiple of 16 bytes.
  template <class Row>
  static size_t Append(std::vector<uint8_t>& bytes, const std::vector<Row>& rows) {
    const size_t at = (bytes.size() + 15) / 16 * 16;
    bytes.resize(at + rows.size() * sizeof(Row));
    std::memcpy(bytes.data() + at, rows.data(), rows.size() * sizeof(Row));
    return at;
  }

  size_t max_bases_;
  Part part_;
  std::unordered_map<int, uint32_t> slots_;
  std::vector<TableItem> items_;
  std::vector<TableOperand> operands_;
  std::vector<uint32_t> tile_items_;
};

}  // namespace

Table MakeTable(const std::vector<SumItem>& items, size_t max_bases) {
  Table table;
  PartBuilder builder(max_bases);
  for (const SumItem& item : items) {
    CheckItem(item);
    if (item.elems == 0 || builder.Add(item)) continue;
    if (!builder.empty()) builder.MoveTo(table);
    builder = PartBuilder(max_bases);
    if (!builder.Add(item)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "an item has at most " + std::to_string(max_bases) + " base pointers, got " +
                      std::to_string(item.sources.size() + item.copies.size() + 1));
    }
  }
  if (!builder.empty()) builder.MoveTo(table);
  return table;
}

}  // namespace tide::kernels::cuda::internal
