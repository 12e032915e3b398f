#include <string>

#include "kernels/host/kernels.h"
#include "tide/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/cast.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "kernels/host/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tide::kernels::internal {
namespace HWY_NAMESPACE {

template <class To, class From>
struct CastKernel {
  uint8_t* dst;
  const uint8_t* src;

  HWY_INLINE void Part(size_t first, size_t elems) const {
    Float v0, v1, v2, v3;
    LoadPart<From>(src + first * From::kBytes, elems, v0, v1, v2, v3);
    StorePart<To>(v0, v1, v2, v3, dst + first * To::kBytes, elems);
  }

  template <bool kStream>
  HWY_INLINE void Blocks(size_t first, size_t blocks) const {
    const size_t block = BlockElems();
    const uint8_t* from = src + first * From::kBytes;
    uint8_t* to = dst + first * To::kBytes;
    for (size_t b = 0; b < blocks; ++b) {
      if constexpr (kStream) PrefetchLines(from + kPrefetchBytes, block * From::kBytes);
      Float v0, v1, v2, v3;
      LoadBlock<From>(from, v0, v1, v2, v3);
      StoreBlock<To, kStream>(v0, v1, v2, v3, to);
      from += block * From::kBytes;
      to += block * To::kBytes;
    }
  }
};

template <class To, class From>
void CastTyped(uint8_t* dst, const uint8_t* src, size_t elems) {
  ForBlocks(CastKernel<To, From>{dst, src}, dst, To::kBytes, elems);
}

template <class From>
void CastFrom(uint8_t* dst, DType dst_dtype, const uint8_t* src, size_t elems) {
  switch (dst_dtype) {
    case DType::kBF16:
      return CastTyped<BF16, From>(dst, src, elems);
    case DType::kF16:
      return CastTyped<F16, From>(dst, src, elems);
    case DType::kF32:
      return CastTyped<F32, From>(dst, src, elems);
    case DType::kU8:
      return;  // refused by the caller
  }
}

void CastAny(uint8_t* dst, DType dst_dtype, const uint8_t* src, DType src_dtype, size_t elems) {
  switch (src_dtype) {
    case DType::kBF16:
      return CastFrom<BF16>(dst, dst_dtype, src, elems);
    case DType::kF16:
      return CastFrom<F16>(dst, dst_dtype, src, elems);
    case DType::kF32:
      return CastFrom<F32>(dst, dst_dtype, src, elems);
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
HWY_EXPORT(CastAny);

void DispatchCast(uint8_t* dst, DType dst_dtype, const uint8_t* src, DType src_dtype,
                  size_t elems) {
  HWY_DYNAMIC_DISPATCH(CastAny)(dst, dst_dtype, src, src_dtype, elems);
}
}  // namespace
}  // namespace internal

void Cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t elems) {
  if (dst_dtype == src_dtype) {
    Copy(dst, src, elems * ItemSize(src_dtype));
    return;
  }
  if (dst_dtype == DType::kU8 || src_dtype == DType::kU8) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("Cast converts between bf16, fp16 and fp32, got ") + Name(src_dtype) +
                    " to " + Name(dst_dtype) + "; use one of these types or copy the bytes");
  }
  internal::DispatchCast(static_cast<uint8_t*>(dst), dst_dtype, static_cast<const uint8_t*>(src),
                         src_dtype, elems);
}

}  // namespace tide::kernels
#endif  // HWY_ONCE
