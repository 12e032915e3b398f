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

// kSources > 0 fixes the number of sources so that their loop unrolls and their pointers stay in registers;
// 0 takes it from the arguments.
template <class Out, class In, size_t kSources>
struct SumKernel {
  const SumArgs& args;

  HWY_INLINE size_t Count() const { return kSources > 0 ? kSources : args.n_sources; }

  HWY_INLINE void Finish(Float& v, Float old) const {
    v = hn::Mul(v, hn::Set(FloatTag(), args.scale));
    if (args.accumulate) v = hn::Add(old, v);
  }

  HWY_INLINE void Part(size_t first, size_t elems) const {
    uint8_t* to = args.out + first * Out::kBytes;
    Float v0, v1, v2, v3, w0, w1, w2, w3;
    for (size_t s = 0; s < args.n_sources; ++s) {
      const auto* from = static_cast<const uint8_t*>(args.sources[s]) + first * In::kBytes;
      LoadPart<In>(from, elems, w0, w1, w2, w3);
      v0 = s == 0 ? w0 : hn::Add(v0, w0);
      v1 = s == 0 ? w1 : hn::Add(v1, w1);
      v2 = s == 0 ? w2 : hn::Add(v2, w2);
      v3 = s == 0 ? w3 : hn::Add(v3, w3);
    }
    if (args.accumulate) LoadPart<Out>(to, elems, w0, w1, w2, w3);
    Finish(v0, w0);
    Finish(v1, w1);
    Finish(v2, w2);
    Finish(v3, w3);
    StorePart<Out>(v0, v1, v2, v3, to, elems);
  }

  template <bool kStream>
  HWY_INLINE void Blocks(size_t first, size_t blocks) const {
    const size_t in_step = BlockElems() * In::kBytes;
    const size_t out_step = BlockElems() * Out::kBytes;
    const void* const* sources = args.sources;
    const void* copies[kSources > 0 ? kSources : 1];
    if constexpr (kSources > 0) {
      for (size_t s = 0; s < kSources; ++s) copies[s] = sources[s];
      sources = copies;
    }
    uint8_t* to = args.out + first * Out::kBytes;
    size_t offset = first * In::kBytes;
    for (size_t b = 0; b < blocks; ++b, offset += in_step, to += out_step) {
      Float v0, v1, v2, v3, w0, w1, w2, w3;
      LoadSource<kStream>(sources[0], offset, in_step, v0, v1, v2, v3);
      for (size_t s = 1; s < Count(); ++s) {
        LoadSource<kStream>(sources[s], offset, in_step, w0, w1, w2, w3);
        v0 = hn::Add(v0, w0);
        v1 = hn::Add(v1, w1);
        v2 = hn::Add(v2, w2);
        v3 = hn::Add(v3, w3);
      }
      if (args.accumulate) LoadBlock<Out>(to, w0, w1, w2, w3);
      Finish(v0, w0);
      Finish(v1, w1);
      Finish(v2, w2);
      Finish(v3, w3);
      StoreBlock<Out, kStream>(v0, v1, v2, v3, to);
    }
  }

  template <bool kPrefetch>
  static HWY_INLINE void LoadSource(const void* source, size_t offset, size_t bytes, Float& v0, Float& v1, Float& v2,
                                    Float& v3) {
    const auto* from = static_cast<const uint8_t*>(source) + offset;
    if constexpr (kPrefetch) {
      for (size_t line = 0; line < bytes; line += kCacheLineBytes) hwy::Prefetch(from + kPrefetchBytes + line);
    }
    LoadBlock<In>(from, v0, v1, v2, v3);
  }
};

template <class Out, class In>
void SumTyped(const SumArgs& args) {
  ForBlocks(SumKernel<Out, In, 0>{args}, args.out, Out::kBytes, args.elems);
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

void Sum(void* out, DType out_dtype, const void* const* sources, size_t n_sources, DType source_dtype, float scale,
         bool accumulate, size_t elems) {
  if (out_dtype == DType::kU8 || source_dtype == DType::kU8) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("Sum takes and gives bf16, fp16 or fp32, got sources of ") + Name(source_dtype) +
                    " and an output of " + Name(out_dtype) + "; cast to one of these types first");
  }
  if (n_sources == 0) {
    if (!accumulate) Zero(out, elems * ItemSize(out_dtype));
    return;
  }
  internal::DispatchSum(internal::SumArgs{static_cast<uint8_t*>(out), out_dtype, sources, n_sources, source_dtype,
                                          scale, accumulate, elems});
}

}  // namespace tide::kernels
#endif  // HWY_ONCE
