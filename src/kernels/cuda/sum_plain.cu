// Sums with ordinary loads, on every GPU, and through a multicast address.
#include "kernels/cuda/sum_kernels.cuh"
#include "kernels/cuda/sum_tile.cuh"

namespace tide::kernels::cuda::internal {
namespace {

constexpr int kPlainThreads = 512;

// This thread's quads of source s, each by Source::LoadQuad; zeros past the end of the tile.
template <class Source, class In, int kQuads>
__device__ __forceinline__ void LoadQuads(const Walk& walk, const Tile& tile, uint32_t s,
                                          typename In::Quad (&quads)[kQuads]) {
  const auto* from =
      reinterpret_cast<const typename In::Quad*>(walk.source(s) + tile.body_begin * In::kBytes);
  const int n_quads = static_cast<int>(tile.body_end - tile.body_begin) / 4;
#pragma unroll
  for (int u = 0; u < kQuads; ++u) {
    const int index = FirstQuad<In, Source::kThreads>() + u * kWarpThreads;
    quads[u] = index < n_quads ? Source::LoadQuad(from + index) : typename In::Quad{};
  }
}

// Each source passes once: loads bypass the first-level cache and leave the second early.
struct GlobalSource {
  static constexpr int kThreads = kPlainThreads;
  static constexpr bool kAhead = true;

  __device__ __forceinline__ Walk MakeWalk(const LaunchArgs& args,
                                           const uint8_t* const* bases) const {
    return Walk(args, bases);
  }

  template <class In>
  static __device__ __forceinline__ float LoadOne(const typename In::Scalar* from) {
    return In::Load(from);
  }

  template <class Quad>
  static __device__ __forceinline__ Quad LoadQuad(const Quad* from) {
    return __ldcs(from);
  }

  template <class In, int kQuads>
  __device__ __forceinline__ void Load(const Walk& walk, const Tile& tile, uint32_t s,
                                       typename In::Quad (&quads)[kQuads]) {
    LoadQuads<GlobalSource, In>(walk, tile, s, quads);
  }
};

// The switch adds what the GPUs of the multicast group have at this address. (Paper, section 4.2:
// multimem.ld_reduce.relaxed.sys.global.add.v4.f32.)
struct MulticastSource {
  static constexpr int kThreads = kPlainThreads;
  static constexpr bool kAhead = false;  // there is one source

  template <class In>
  static __device__ __forceinline__ float LoadOne(const typename In::Scalar* from) {
    float value = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.f32 %0, [%1];"
                 : "=f"(value)
                 : "l"(from)
                 : "memory");
#endif
    return value;
  }

  static __device__ __forceinline__ float4 LoadQuad(const float4* from) {
    float4 quad{};
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(quad.x), "=f"(quad.y), "=f"(quad.z), "=f"(quad.w)
                 : "l"(from)
                 : "memory");
#endif
    return quad;
  }

  template <class In, int kQuads>
  __device__ __forceinline__ void Load(const Walk& walk, const Tile& tile, uint32_t s,
                                       typename In::Quad (&quads)[kQuads]) {
    LoadQuads<MulticastSource, In>(walk, tile, s, quads);
  }
};

template <int kBases>
__global__ void __launch_bounds__(kPlainThreads)
    tide_sum_plain(const __grid_constant__ LaunchParams<kBases> params) {
  GlobalSource source;
  SumTiles(params.args, params.bases, source);
}

// All sources are fp32.
template <int kBases>
__global__ void __launch_bounds__(kPlainThreads)
    tide_land_multicast(const __grid_constant__ LaunchParams<kBases> params) {
  MulticastSource source;
  for (Walk walk(params.args, params.bases); !walk.AtEnd(); walk.Next()) {
    switch (walk.item().dst_dtype) {
      case DType::kBF16:
        SumTile<BF16, F32>(params.args, walk, source);
        break;
      case DType::kF16:
        SumTile<F16, F32>(params.args, walk, source);
        break;
      default:
        SumTile<F32, F32>(params.args, walk, source);
        break;
    }
  }
}

}  // namespace

Kernel PlainKernel(bool many) {
  return {many ? reinterpret_cast<const void*>(tide_sum_plain<kManyBases>)
               : reinterpret_cast<const void*>(tide_sum_plain<kFewBases>),
          kPlainThreads};
}

Kernel MulticastKernel(bool many) {
  return {many ? reinterpret_cast<const void*>(tide_land_multicast<kManyBases>)
               : reinterpret_cast<const void*>(tide_land_multicast<kFewBases>),
          kPlainThreads};
}

}  // namespace tide::kernels::cuda::internal
