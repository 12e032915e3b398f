// Element types as device code: groups of four, widened to fp32 and narrowed to nearest even.
//
// Intrinsics with _rn are never fused, whatever the compiler's flags.
#ifndef TIDE_KERNELS_CUDA_NUMBERS_CUH_
#define TIDE_KERNELS_CUDA_NUMBERS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tide::kernels::cuda::internal {

__device__ __forceinline__ float4 AddFour(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

__device__ __forceinline__ float4 ScaleFour(float4 a, float scale) {
  return {__fmul_rn(a.x, scale), __fmul_rn(a.y, scale), __fmul_rn(a.z, scale),
          __fmul_rn(a.w, scale)};
}

struct F32 {
  static constexpr int kBytes = 4;
  using Scalar = float;
  using Quad = float4;  // four elements

  static __device__ __forceinline__ float Load(const Scalar* from) { return *from; }
  static __device__ __forceinline__ void Store(Scalar* to, float value) { *to = value; }
  static __device__ __forceinline__ float4 Widen(Quad quad) { return quad; }
  static __device__ __forceinline__ Quad Narrow(float4 four) { return four; }
  static __device__ __forceinline__ float4 AddTo(float4 sum, Quad quad) {
    return AddFour(sum, quad);
  }
};

// sum + element, where the element is the low or high half of `pair`. From sm_100 on one
// instruction widens and adds; it rounds once, as widening is exact.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define TIDE_MIXED_ADD(type, sum_lo, sum_hi, pair)                            \
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"                         \
      "add.rn.f32." type " %0, lo, %0;\nadd.rn.f32." type " %1, hi, %1;\n}\n" \
      : "+f"(sum_lo), "+f"(sum_hi)                                            \
      : "r"(pair))
#endif

struct BF16 {
  static constexpr int kBytes = 2;
  using Scalar = __nv_bfloat16;
  using Quad = uint2;

  static __device__ __forceinline__ float Load(const Scalar* from) {
    return __bfloat162float(*from);
  }
  static __device__ __forceinline__ void Store(Scalar* to, float value) {
    *to = __float2bfloat16_rn(value);
  }
  static __device__ __forceinline__ float4 Widen(Quad quad) {
    return {Low(quad.x), High(quad.x), Low(quad.y), High(quad.y)};
  }
  static __device__ __forceinline__ Quad Narrow(float4 four) {
    return {Pair(four.x, four.y), Pair(four.z, four.w)};
  }
  static __device__ __forceinline__ float4 AddTo(float4 sum, Quad quad) {
#ifdef TIDE_MIXED_ADD
    TIDE_MIXED_ADD("bf16", sum.x, sum.y, quad.x);
    TIDE_MIXED_ADD("bf16", sum.z, sum.w, quad.y);
    return sum;
#else
    return AddFour(sum, Widen(quad));
#endif
  }

 private:
  static __device__ __forceinline__ float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float High(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
  }
  static __device__ __forceinline__ uint32_t Pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

struct F16 {
  static constexpr int kBytes = 2;
  using Scalar = __half;
  using Quad = uint2;

  static __device__ __forceinline__ float Load(const Scalar* from) { return __half2float(*from); }
  static __device__ __forceinline__ void Store(Scalar* to, float value) {
    *to = __float2half_rn(value);
  }
  static __device__ __forceinline__ float4 Widen(Quad quad) {
    const float2 low = Pair(quad.x), high = Pair(quad.y);
    return {low.x, low.y, high.x, high.y};
  }
  static __device__ __forceinline__ Quad Narrow(float4 four) {
    return {Pair(four.x, four.y), Pair(four.z, four.w)};
  }
  static __device__ __forceinline__ float4 AddTo(float4 sum, Quad quad) {
#ifdef TIDE_MIXED_ADD
    TIDE_MIXED_ADD("f16", sum.x, sum.y, quad.x);
    TIDE_MIXED_ADD("f16", sum.z, sum.w, quad.y);
    return sum;
#else
    return AddFour(sum, Widen(quad));
#endif
  }

 private:
  static __device__ __forceinline__ float2 Pair(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  static __device__ __forceinline__ uint32_t Pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

}  // namespace tide::kernels::cuda::internal

#endif  // TIDE_KERNELS_CUDA_NUMBERS_CUH_
