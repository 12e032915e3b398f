// The sum of one tile, whatever brings the sources into registers.
//
// A Source has
//   kThreads                       threads that add one tile; a block may have several such teams
//   MakeWalk(args, bases)          the tiles of this thread's team
//   kAhead                         whether to load a source while the one before it is added: hides
//                                  the latency of memory, costs registers
//   Load<In>(walk, tile, s, quads) this thread's quads of source s; called once for each s in order
//   LoadOne<In>(from)              one element, at any time
// where quads are groups of four elements, and a warp's quads are consecutive.
#ifndef TIDE_KERNELS_CUDA_SUM_TILE_CUH_
#define TIDE_KERNELS_CUDA_SUM_TILE_CUH_

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/walk.cuh"

namespace tide::kernels::cuda::internal {

constexpr int kWarpThreads = 32;

template <class In, int kThreads>
constexpr int kQuadsAThread = static_cast<int>(kTileBytes / sizeof(typename In::Quad)) / kThreads;

// Of this thread in its team.
template <int kThreads>
__device__ __forceinline__ int ThreadOfTeam() {
  return static_cast<int>(threadIdx.x) % kThreads;
}

// The first of this thread's quads; the others follow at distances of kWarpThreads.
template <class In, int kThreads>
__device__ __forceinline__ int FirstQuad() {
  const int warp = ThreadOfTeam<kThreads>() / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  return warp * kWarpThreads * kQuadsAThread<In, kThreads> + lane;
}

// Elements that are not in whole aligned groups, four at a time for each thread.
template <class Out, class In, class Source>
__device__ void SumSingly(const LaunchArgs& args, const Walk& walk, int64_t begin, int64_t end) {
  constexpr int kUnroll = 4, kThreads = Source::kThreads;
  auto* dst = reinterpret_cast<typename Out::Scalar*>(walk.dst());
  for (int64_t at = begin + ThreadOfTeam<kThreads>(); at < end; at += kUnroll * kThreads) {
    float sum[kUnroll];
    for (uint32_t s = 0; s < walk.item().n_sources; ++s) {
      const auto* from = reinterpret_cast<const typename In::Scalar*>(walk.source(s));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = at + u * kThreads;
        const float value = i < end ? Source::template LoadOne<In>(from + i) : 0.0f;
        sum[u] = s == 0 ? value : __fadd_rn(sum[u], value);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = at + u * kThreads;
      if (i >= end) continue;
      float result = __fmul_rn(sum[u], args.scale);
      if (args.accumulate) result = __fadd_rn(Out::Load(dst + i), result);
      Out::Store(dst + i, result);
    }
  }
}

template <class Out, class In, class Source>
__device__ __forceinline__ void SumBody(const LaunchArgs& args, const Walk& walk, const Tile& tile,
                                        Source& source) {
  constexpr int kQuads = kQuadsAThread<In, Source::kThreads>;
  const int n_quads = static_cast<int>(tile.body_end - tile.body_begin) / 4;
  const int first = FirstQuad<In, Source::kThreads>();
  auto* to = reinterpret_cast<typename Out::Quad*>(walk.dst() + tile.body_begin * Out::kBytes);

  // The old values are on their way while the sources are added.
  typename Out::Quad old[kQuads] = {};
  if (args.accumulate) {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int index = first + u * kWarpThreads;
      if (index < n_quads) old[u] = __ldcs(to + index);
    }
  }

  const uint32_t n_sources = walk.item().n_sources;
  typename In::Quad now[kQuads], next[kQuads];
  float4 sum[kQuads];
  source.template Load<In>(walk, tile, 0, now);
  if (Source::kAhead && n_sources > 1) source.template Load<In>(walk, tile, 1, next);
#pragma unroll
  for (int u = 0; u < kQuads; ++u) sum[u] = In::Widen(now[u]);
  for (uint32_t s = 1; s < n_sources; ++s) {
    if constexpr (Source::kAhead) {
#pragma unroll
      for (int u = 0; u < kQuads; ++u) now[u] = next[u];
      if (s + 1 < n_sources) source.template Load<In>(walk, tile, s + 1, next);
    } else {
      source.template Load<In>(walk, tile, s, now);
    }
#pragma unroll
    for (int u = 0; u < kQuads; ++u) sum[u] = In::AddTo(sum[u], now[u]);
  }

#pragma unroll
  for (int u = 0; u < kQuads; ++u) {
    const int index = first + u * kWarpThreads;
    float4 result = ScaleFour(sum[u], args.scale);
    if (args.accumulate) result = AddFour(Out::Widen(old[u]), result);
    if (index < n_quads) __stcs(to + index, Out::Narrow(result));
  }
}

template <class Out, class In, class Source>
__device__ __forceinline__ void SumTile(const LaunchArgs& args, const Walk& walk, Source& source) {
  const Tile tile = walk.tile();
  if (tile.body_begin < tile.body_end) SumBody<Out, In>(args, walk, tile, source);
  if (tile.begin < tile.body_begin) {
    SumSingly<Out, In, Source>(args, walk, tile.begin, tile.body_begin);
  }
  if (tile.body_end < tile.end) {
    SumSingly<Out, In, Source>(args, walk, tile.body_end, tile.end);
  }
}

template <class Out, class Source>
__device__ __forceinline__ void SumTileTo(const LaunchArgs& args, const Walk& walk,
                                          Source& source) {
  switch (walk.item().src_dtype) {
    case DType::kBF16:
      return SumTile<Out, BF16>(args, walk, source);
    case DType::kF16:
      return SumTile<Out, F16>(args, walk, source);
    default:
      return SumTile<Out, F32>(args, walk, source);
  }
}

// Adds every tile of this team's walk.
template <class Source>
__device__ __forceinline__ void SumTiles(const LaunchArgs& args, const uint8_t* const* bases,
                                         Source& source) {
  for (Walk walk = source.MakeWalk(args, bases); !walk.AtEnd(); walk.Next()) {
    switch (walk.item().dst_dtype) {
      case DType::kBF16:
        SumTileTo<BF16>(args, walk, source);
        break;
      case DType::kF16:
        SumTileTo<F16>(args, walk, source);
        break;
      default:
        SumTileTo<F32>(args, walk, source);
        break;
    }
  }
}

}  // namespace tide::kernels::cuda::internal

#endif  // TIDE_KERNELS_CUDA_SUM_TILE_CUH_
