// Clears bytes: the items are bytes without sources.
#include "kernels/cuda/sum_kernels.cuh"
#include "kernels/cuda/walk.cuh"

namespace tide::kernels::cuda::internal {
namespace {

constexpr int kZeroThreads = 512;

template <int kBases>
__global__ void __launch_bounds__(kZeroThreads)
    tide_zero(const __grid_constant__ LaunchParams<kBases> params) {
  for (Walk walk(params.args, params.bases); !walk.AtEnd(); walk.Next()) {
    const Tile tile = walk.tile();
    uint8_t* dst = walk.dst();
    for (int64_t i = tile.begin + threadIdx.x; i < tile.body_begin; i += kZeroThreads) dst[i] = 0;
    for (int64_t i = tile.body_end + threadIdx.x; i < tile.end; i += kZeroThreads) dst[i] = 0;
    auto* groups = reinterpret_cast<uint2*>(dst + tile.body_begin);
    const int64_t n_groups = (tile.body_end - tile.body_begin) / kGroupElems;
    static_assert(sizeof(uint2) == kGroupElems);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n_groups; i += kZeroThreads) {
      __stcs(groups + i, uint2{0, 0});
    }
  }
}

}  // namespace

Kernel ZeroKernel(bool many) {
  return {many ? reinterpret_cast<const void*>(tide_zero<kManyBases>)
               : reinterpret_cast<const void*>(tide_zero<kFewBases>),
          kZeroThreads};
}

}  // namespace tide::kernels::cuda::internal
