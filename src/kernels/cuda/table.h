// The items of a batch as kernels read them: tables in device memory, and the arithmetic that cuts
// an item into tiles. No CUDA types, so that host tests check it.
#ifndef TIDE_KERNELS_CUDA_TABLE_H_
#define TIDE_KERNELS_CUDA_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/kernels.h"

#ifdef __CUDACC__
#define TIDE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TIDE_HOST_DEVICE inline
#endif

namespace tide::kernels::cuda::internal {

// Bytes of each source in a tile, and of a slot of the bulk path's ring.
inline constexpr int64_t kTileBytes = 8192;
// Bulk copies and vector loads need such addresses.
inline constexpr int64_t kVectorBytes = 16;
// The vectorised part of a tile consists of whole groups: 16 bytes of 2-byte elements.
inline constexpr int64_t kGroupElems = 8;
// Base pointers of one launch. The larger count fills the 32764 bytes of kernel parameters; most
// batches need few, and a launch that copies less is faster.
inline constexpr int kFewBases = 48;
inline constexpr int kManyBases = 4080;

struct TableOperand {
  int64_t offset;
  uint32_t base;  // slot in the launch's base pointers
  uint32_t unused;
};

// Operands of an item: dst, then the sources, then the copies.
struct TableItem {
  int64_t elems;
  int64_t first_tile;
  uint32_t first_operand;
  uint32_t n_copies;
  uint16_t n_sources;
  DType dst_dtype;
  DType src_dtype;
};

// One launch: the items whose bases fit into its parameters.
struct Part {
  size_t tile_items_at =
      0;                   // byte offsets of the tables: uint32_t[n_tiles], the item of each tile,
  size_t items_at = 0;     // TableItem[],
  size_t operands_at = 0;  // TableOperand[]
  int64_t n_tiles = 0;
  std::vector<int> bases;          // slot -> number of the base pointer
  std::vector<size_t> alignments;  // slot -> what the base pointer must be a multiple of
};

struct Table {
  std::vector<uint8_t> bytes;
  std::vector<Part> parts;
};

// Items without elements are left out. Throws Error(kInvalidArgument) for an item that no kernel
// could run. An item without sources is one to be cleared.
Table MakeTable(const std::vector<SumItem>& items, size_t max_bases = kManyBases);

TIDE_HOST_DEVICE constexpr int64_t Bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kU8 ? 1 : 2;
}

TIDE_HOST_DEVICE constexpr int64_t TileElems(DType src_dtype) {
  return kTileBytes / Bytes(src_dtype);
}

TIDE_HOST_DEVICE constexpr int64_t TileCount(int64_t elems, DType src_dtype) {
  return (elems + TileElems(src_dtype) - 1) / TileElems(src_dtype);
}

inline constexpr int64_t kNeverAligned = -1;

// The first element of a source at which its address is a multiple of kVectorBytes.
TIDE_HOST_DEVICE constexpr int64_t FirstAligned(uint64_t address, int64_t elem_bytes) {
  const uint64_t past = address % kVectorBytes;
  return past == 0 ? 0 : (kVectorBytes - static_cast<int64_t>(past)) / elem_bytes;
}

TIDE_HOST_DEVICE constexpr bool AlignedAt(uint64_t address, int64_t elem_bytes, int64_t elem) {
  return (address + static_cast<uint64_t>(elem * elem_bytes)) % kVectorBytes == 0;
}

// The elements of one tile: [begin, body_begin) and [body_end, end) one by one, the body in whole
// groups from an element at which every operand is aligned.
struct Tile {
  int64_t begin;
  int64_t body_begin;
  int64_t body_end;
  int64_t end;
};

// Tile `index` of an item of `elems` elements that are all aligned at element `head`, or never.
// Tiles are shifted by the head, so that each body but the last is a whole tile.
TIDE_HOST_DEVICE constexpr Tile CutTile(int64_t elems, int64_t index, int64_t tile_elems,
                                        int64_t head) {
  const bool never = head == kNeverAligned;
  const int64_t shift = never ? 0 : head;
  const int64_t from = shift + index * tile_elems;
  const int64_t to = from + tile_elems;
  const int64_t body_begin = from < elems ? from : elems;
  const int64_t end = to < elems ? to : elems;
  if (never) return {body_begin, end, end, end};
  const int64_t groups = (end - body_begin) / kGroupElems;
  return {index == 0 ? 0 : body_begin, body_begin, body_begin + groups * kGroupElems, end};
}

}  // namespace tide::kernels::cuda::internal

#endif  // TIDE_KERNELS_CUDA_TABLE_H_
