// Casts, or copies of equal types, to the memory of all ranks of a node, written only where the own
// memory does not hold the result already: then every rank's does, and nothing crosses the links.
#include <type_traits>

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/sum_kernels.cuh"
#include "kernels/cuda/walk.cuh"

namespace tide::kernels::cuda::internal {
namespace {

constexpr int kRefreshThreads = 512;

__device__ __forceinline__ bool Differ(uint2 a, uint2 b) { return a.x != b.x || a.y != b.y; }
__device__ __forceinline__ bool Differ(float4 a, float4 b) {  // in bits: NaNs equal themselves
  return __float_as_uint(a.x) != __float_as_uint(b.x) ||
         __float_as_uint(a.y) != __float_as_uint(b.y) ||
         __float_as_uint(a.z) != __float_as_uint(b.z) ||
         __float_as_uint(a.w) != __float_as_uint(b.w);
}
template <class Bits>
__device__ __forceinline__ bool Differ(Bits a, Bits b) {
  return a != b;
}
__device__ __forceinline__ bool Differ(float a, float b) {
  return __float_as_uint(a) != __float_as_uint(b);
}
__device__ __forceinline__ bool Differ(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __bfloat16_as_ushort(a) != __bfloat16_as_ushort(b);
}
__device__ __forceinline__ bool Differ(__half a, __half b) {
  return __half_as_ushort(a) != __half_as_ushort(b);
}

// `index` counts values of this type from `offset` bytes into dst.
template <class Value>
__device__ __forceinline__ void Write(const Walk& walk, int64_t offset, int64_t index,
                                      Value value) {
  for (uint32_t c = 0; c <= walk.item().n_copies; ++c) {
    reinterpret_cast<Value*>(walk.copy(c) + offset)[index] = value;
  }
}

// As a cast, which is a sum of one source.
template <class Out, class In>
struct Conversion {
  static constexpr int kSourceBytes = In::kBytes;
  static constexpr int kBytes = Out::kBytes;
  static constexpr int kGroup = 4;  // elements
  using Source = typename In::Quad;
  using Group = typename Out::Quad;
  using SourceOne = typename In::Scalar;
  using One = typename Out::Scalar;

  static __device__ __forceinline__ Group Convert(Source group) {
    return Out::Narrow(ScaleFour(In::Widen(group), 1.0f));
  }
  static __device__ __forceinline__ One ConvertOne(const SourceOne* from) {
    One one;
    Out::Store(&one, __fmul_rn(In::Load(from), 1.0f));
    return one;
  }
};

// Equal types, whose bits stay: a conversion to fp32 and back would change NaNs.
template <class Bits, class Several>
struct Same {
  static constexpr int kSourceBytes = sizeof(Bits);
  static constexpr int kBytes = sizeof(Bits);
  static constexpr int kGroup = sizeof(Several) / sizeof(Bits);
  using Source = Several;
  using Group = Several;
  using SourceOne = Bits;
  using One = Bits;

  static __device__ __forceinline__ Group Convert(Source group) { return group; }
  static __device__ __forceinline__ One ConvertOne(const SourceOne* from) { return *from; }
};

template <class As>
__device__ void RefreshSingly(const Walk& walk, int64_t begin, int64_t end) {
  const auto* from = reinterpret_cast<const typename As::SourceOne*>(walk.source(0));
  const auto* own = reinterpret_cast<const typename As::One*>(walk.dst());
  for (int64_t i = begin + threadIdx.x; i < end; i += kRefreshThreads) {
    const typename As::One one = As::ConvertOne(from + i);
    if (Differ(one, own[i])) Write(walk, 0, i, one);
  }
}

template <class As>
__device__ __forceinline__ void RefreshTile(const Walk& walk) {
  const Tile tile = walk.tile();
  const int64_t to = tile.body_begin * As::kBytes;
  const auto* from = reinterpret_cast<const typename As::Source*>(
      walk.source(0) + tile.body_begin * As::kSourceBytes);
  const auto* own = reinterpret_cast<const typename As::Group*>(walk.dst() + to);
  const int n_groups = static_cast<int>(tile.body_end - tile.body_begin) / As::kGroup;
  for (int i = static_cast<int>(threadIdx.x); i < n_groups; i += kRefreshThreads) {
    const typename As::Source source = __ldcs(from + i);
    const typename As::Group old = __ldcs(own + i);
    const typename As::Group now = As::Convert(source);
    if (Differ(now, old)) Write(walk, to, i, now);
  }
  RefreshSingly<As>(walk, tile.begin, tile.body_begin);
  RefreshSingly<As>(walk, tile.body_end, tile.end);
}

__device__ __forceinline__ void RefreshTileOfSame(const Walk& walk) {
  switch (Bytes(walk.item().dst_dtype)) {
    case 1:
      return RefreshTile<Same<uint8_t, uint2>>(walk);
    case 2:
      return RefreshTile<Same<uint16_t, uint2>>(walk);
    default:
      return RefreshTile<Same<float, float4>>(walk);
  }
}

template <class Out, class In>
__device__ __forceinline__ void RefreshTileFrom(const Walk& walk) {
  if constexpr (!std::is_same_v<Out, In>) RefreshTile<Conversion<Out, In>>(walk);
}

template <class Out>
__device__ __forceinline__ void RefreshTileTo(const Walk& walk) {
  switch (walk.item().src_dtype) {
    case DType::kBF16:
      return RefreshTileFrom<Out, BF16>(walk);
    case DType::kF16:
      return RefreshTileFrom<Out, F16>(walk);
    default:
      return RefreshTileFrom<Out, F32>(walk);
  }
}

template <int kBases>
__global__ void __launch_bounds__(kRefreshThreads, RefreshBatch::kCtasAMultiprocessor)
    tide_refresh(const __grid_constant__ LaunchParams<kBases> params) {
  for (Walk walk(params.args, params.bases); !walk.AtEnd(); walk.Next()) {
    if (walk.item().src_dtype == walk.item().dst_dtype) {
      RefreshTileOfSame(walk);
      continue;
    }
    switch (walk.item().dst_dtype) {
      case DType::kBF16:
        RefreshTileTo<BF16>(walk);
        break;
      case DType::kF16:
        RefreshTileTo<F16>(walk);
        break;
      default:
        RefreshTileTo<F32>(walk);
        break;
    }
  }
}

}  // namespace

Kernel RefreshKernel(bool many) {
  return {many ? reinterpret_cast<const void*>(tide_refresh<kManyBases>)
               : reinterpret_cast<const void*>(tide_refresh<kFewBases>),
          kRefreshThreads};
}

}  // namespace tide::kernels::cuda::internal
