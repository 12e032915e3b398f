// The way of a worker, a thread block or a part of one, through the tiles of a launch.
//
// Workers take turns, so that all of them read the same region of memory at a time. Every thread
// follows the walk on its own: the tables are small, read by all threads alike and cached. Inside
// an item the table of tiles, whose rows are too far apart for the cache, is not read.
#ifndef TIDE_KERNELS_CUDA_WALK_CUH_
#define TIDE_KERNELS_CUDA_WALK_CUH_

#include <cstdint>

#include "kernels/cuda/table.h"

namespace tide::kernels::cuda::internal {

// What the kernel needs besides the base pointers.
struct LaunchArgs {
  const uint32_t* tile_items;
  const TableItem* items;
  const TableOperand* operands;
  int64_t n_tiles;
  float scale;
  uint32_t accumulate;
  uint32_t n_slots;  // of a ring of the bulk path
};

// A kernel's one parameter.
template <int kBases>
struct LaunchParams {
  LaunchArgs args;
  const uint8_t* bases[kBases];
};
static_assert(sizeof(LaunchParams<kManyBases>) <= 32764);

class Walk {
 public:
  // The walk of a thread block.
  __device__ __forceinline__ Walk(const LaunchArgs& args, const uint8_t* const* bases)
      : Walk(args, bases, blockIdx.x, gridDim.x) {}

  __device__ __forceinline__ Walk(const LaunchArgs& args, const uint8_t* const* bases,
                                  uint32_t worker, uint32_t workers)
      : args_(args), bases_(bases), step_(workers), tile_(worker) {
    if (tile_ < args_.n_tiles) Enter(__ldg(args_.tile_items + tile_));
  }

  __device__ __forceinline__ bool AtEnd() const { return tile_ >= args_.n_tiles; }

  __device__ __forceinline__ void Next() {
    tile_ += step_;
    if (tile_ >= args_.n_tiles || tile_ < item_end_) return;
    Enter(__ldg(args_.tile_items + tile_));
  }

  __device__ __forceinline__ const TableItem& item() const { return item_; }

  __device__ __forceinline__ Tile tile() const {
    return CutTile(item_.elems, tile_ - item_.first_tile, TileElems(item_.src_dtype), head_);
  }

  __device__ __forceinline__ uint8_t* dst() const {
    return const_cast<uint8_t*>(Address(item_.first_operand));
  }

  __device__ __forceinline__ const uint8_t* source(uint32_t index) const {
    return Address(item_.first_operand + 1 + index);
  }

  // dst, then the places of its copies.
  __device__ __forceinline__ uint8_t* copy(uint32_t index) const {
    if (index == 0) return dst();
    return const_cast<uint8_t*>(Address(item_.first_operand + item_.n_sources + index));
  }

 private:
  __device__ __forceinline__ void Enter(uint32_t item) {
    item_ = args_.items[item];
    item_end_ = item_.first_tile + TileCount(item_.elems, item_.src_dtype);
    head_ = CommonHead();
  }

  __device__ __forceinline__ const uint8_t* Address(uint32_t operand) const {
    const TableOperand at = args_.operands[operand];
    return bases_[at.base] + at.offset;
  }

  // The first element at which all operands are aligned; copies are aligned as dst. Four-byte
  // sources repeat their alignment within a group, so that a two-byte dst may need the second
  // place.
  __device__ __forceinline__ int64_t CommonHead() const {
    const int64_t src_bytes = Bytes(item_.src_dtype), dst_bytes = Bytes(item_.dst_dtype);
    const uint64_t to = reinterpret_cast<uint64_t>(dst());
    if (item_.n_sources == 0) return FirstAligned(to, dst_bytes);
    int64_t head = FirstAligned(reinterpret_cast<uint64_t>(source(0)), src_bytes);
    for (uint32_t s = 1; s < item_.n_sources; ++s) {
      if (!AlignedAt(reinterpret_cast<uint64_t>(source(s)), src_bytes, head)) return kNeverAligned;
    }
    for (; head < kGroupElems; head += kVectorBytes / src_bytes) {
      if (AlignedAt(to, dst_bytes, head)) return head;
    }
    return kNeverAligned;
  }

  const LaunchArgs& args_;
  const uint8_t* const* bases_;
  const uint32_t step_;
  int64_t tile_;
  int64_t head_ = 0;
  int64_t item_end_ = 0;  // the first tile behind the item
  TableItem item_ = {};
};

}  // namespace tide::kernels::cuda::internal

#endif  // TIDE_KERNELS_CUDA_WALK_CUH_
