#include <string>

#include "kernels/host/kernels.h"
#include "tide/error.h"

#ifndef TIDE_KERNELS_HOST_SUM_CC_
#define TIDE_KERNELS_HOST_SUM_CC_
namespace tide::kernels::internal {

struct SumArgs {
  uint8_t* out;
  DType out_dtype;
  const void* const* sources;
  size_t n_sources;  // at least one
  DType source_dtype;
  float scale;
  bool accumulate;
  size_t elems;
};

}  // namespace tide::kernels::internal
#endif  // TIDE_KERNELS_HOST_SUM_CC_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/sum.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "kernels/host/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tide::kernels::internal {
namespace HWY_NAMESPACE {

// All sources advance together and every output vector is written once, from registers. Adding a
// few sources at a time over cache-sized strips reads fewer streams at once, but measured slower
// for 4 to 16 sources.
template <class Out, class In>
struct SumKernel {
  const SumArgs& args;

  HWY_INLINE void Part(size_t first, size_t elems) const {
    uint8_t* to = args.out + first * Out::kBytes;
    Float v0, v1, v2, v3, w0, w1, w2, w3;
    LoadPart<In>(Source(0, first), elems, v0, v1, v2, v3);
    for (size_t s = 1; s < args.n_sources; ++s) {
      LoadPart<In>(Source(s, first), elems, w0, w1, w2, w3);
      AddBlock(v0, v1, v2, v3, w0, w1, w2, w3);
    }
    ScaleBlock(v0, v1, v2, v3);
    if (args.accumulate) {
      LoadPart<Out>(to, elems, w0, w1, w2, w3);
      AddBlock(v0, v1, v2, v3, w0, w1, w2, w3);
    }
    StorePart<Out>(v0, v1, v2, v3, to, elems);
  }

  template <bool kStream>
  HWY_INLINE void Blocks(size_t first, size_t blocks) const {
    const size_t block = BlockElems();
    for (size_t b = 0; b < blocks; ++b, first += block) {
      Float v0, v1, v2, v3, w0, w1, w2, w3;
      LoadSource<kStream>(Source(0, first), v0, v1, v2, v3);
      for (size_t s = 1; s < args.n_sources; ++s) {
        LoadSource<kStream>(Source(s, first), w0, w1, w2, w3);
        AddBlock(v0, v1, v2, v3, w0, w1, w2, w3);
      }
      uint8_t* to = args.out + first * Out::kBytes;
      ScaleBlock(v0, v1, v2, v3);
      if (args.accumulate) {
        LoadBlock<Out>(to, w0, w1, w2, w3);
        AddBlock(v0, v1, v2, v3, w0, w1, w2, w3);
      }
      StoreBlock<Out, kStream>(v0, v1, v2, v3, to);
    }
  }

  HWY_INLINE const uint8_t* Source(size_t source, size_t first) const {
    return static_cast<const uint8_t*>(args.sources[source]) + first * In::kBytes;
  }

  static HWY_INLINE void AddBlock(Float& v0, Float& v1, Float& v2, Float& v3, Float w0, Float w1,
                                  Float w2, Float w3) {
    v0 = hn::Add(v0, w0);
    v1 = hn::Add(v1, w1);
    v2 = hn::Add(v2, w2);
    v3 = hn::Add(v3, w3);
  }

  HWY_INLINE void ScaleBlock(Float& v0, Float& v1, Float& v2, Float& v3) const {
    const Float scale = hn::Set(FloatTag(), args.scale);
    v0 = hn::Mul(v0, scale);
    v1 = hn::Mul(v1, scale);
    v2 = hn::Mul(v2, scale);
    v3 = hn::Mul(v3, scale);
  }

  template <bool kPrefetch>
  static HWY_INLINE void LoadSource(const uint8_t* from, Float& v0, Float& v1, Float& v2,
                                    Float& v3) {
    if constexpr (kPrefetch) PrefetchLines(from + kSumPrefetchBytes, BlockElems() * In::kBytes);
    LoadBlock<In>(from, v0, v1, v2, v3);
  }
};

template <class Out, class In>
void SumTyped(const SumArgs& args) {
  ForBlocks(SumKernel<Out, In>{args}, args.out, Out::kBytes, args.elems);
}

template <class Out>
void SumTo(const SumArgs& args) {
  switch (args.source_dtype) {
    case DType::kBF16:
      return SumTyped<Out, BF16>(args);
    case DType::kF16:
      return SumTyped<Out, F16>(args);
    case DType::kF32:
      return SumTyped<Out, F32>(args);
    case DType::kU8:
      return;  // refused by the caller
  }
}

void SumAny(const SumArgs& args) {
  switch (args.out_dtype) {
    case DType::kBF16:
      return SumTo<BF16>(args);
    case DType::kF16:
      return SumTo<F16>(args);
    case DType::kF32:
      return SumTo<F32>(args);
    case DType::kU8:
      return;  // refused by the caller
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tide::kernels::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tide::kernels {
namespace internal {
namespace {
HWY_EXPORT(SumAny);

void DispatchSum(const SumArgs& args) { HWY_DYNAMIC_DISPATCH(SumAny)(args); }
}  // namespace
}  // namespace internal

void Sum(void* out, DType out_dtype, const void* const* sources, size_t n_sources,
         DType source_dtype, float scale, bool accumulate, size_t elems) {
  if (out_dtype == DType::kU8 || source_dtype == DType::kU8) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("Sum takes and gives bf16, fp16 or fp32, got sources of ") +
                    Name(source_dtype) + " and an output of " + Name(out_dtype) +
                    "; cast to one of these types first");
  }
  if (n_sources == 0) {
    if (!accumulate) Zero(out, elems * ItemSize(out_dtype));
    return;
  }
  internal::DispatchSum(internal::SumArgs{static_cast<uint8_t*>(out), out_dtype, sources, n_sources,
                                          source_dtype, scale, accumulate, elems});
}

}  // namespace tide::kernels
#endif  // HWY_ONCE
