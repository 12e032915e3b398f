// Element types as Highway code: widening loads, narrowing stores, blocks. Included once per
// instruction set.
//
// A block is four vectors of fp32. Bodies work on whole blocks in place; heads and tails go through
// the same code on a padded buffer, so that no second, scalar version of the arithmetic exists.
// Pointers are bytes: alignment is unknown, and typed access would break aliasing rules.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/host/stream.h"

#if defined(TIDE_KERNELS_HOST_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TIDE_KERNELS_HOST_CONVERT_INL_H_
#undef TIDE_KERNELS_HOST_CONVERT_INL_H_
#else
#define TIDE_KERNELS_HOST_CONVERT_INL_H_
#endif

// Highway's fallback conversion of fp16 neither rounds to even nor keeps infinities; use it only
// where it is one instruction.
#undef TIDE_HAVE_F16_CONVERSION
#if !defined(HWY_DISABLE_F16C) && (HWY_ARCH_ARM_A64 || HWY_TARGET == HWY_AVX2 || \
                                   HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL)
#define TIDE_HAVE_F16_CONVERSION 1
#else
#define TIDE_HAVE_F16_CONVERSION 0
#endif

HWY_BEFORE_NAMESPACE();
namespace tide::kernels::internal {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Float = hn::Vec<FloatTag>;
using HalfTag = hn::Rebind<uint16_t, FloatTag>;  // as many 16-bit lanes as a vector has floats
using HalfPairTag = hn::Repartition<uint16_t, FloatTag>;  // a whole vector of 16-bit lanes
using UintTag = hn::RebindToUnsigned<FloatTag>;
using IntTag = hn::RebindToSigned<FloatTag>;

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kQuietBit = 0x00400000u;

template <class D>
HWY_INLINE hn::Vec<D> LoadBytes(D d, const uint8_t* from) {
  return hn::LoadU(d, reinterpret_cast<const hn::TFromD<D>*>(from));
}

template <bool kStream, class D>
HWY_INLINE void StoreBytes(hn::Vec<D> v, D d, uint8_t* to) {
  auto* typed = reinterpret_cast<hn::TFromD<D>*>(to);
  if constexpr (kStream) {
    hn::Stream(v, d, typed);
  } else {
    hn::StoreU(v, d, typed);
  }
}

// Keeps the low 16 bits of each lane; the others must be zero, which makes the saturation of
// DemoteTo moot.
HWY_INLINE hn::Vec<HalfTag> Low16(hn::Vec<UintTag> v) {
  return hn::DemoteTo(HalfTag(), hn::BitCast(IntTag(), v));
}

struct F32 {
  static constexpr size_t kBytes = 4;
  static HWY_INLINE Float Load(const uint8_t* from) { return LoadBytes(FloatTag(), from); }
};

struct BF16 {
  static constexpr size_t kBytes = 2;

  static HWY_INLINE Float Load(const uint8_t* from) {
    const auto wide = hn::PromoteTo(UintTag(), LoadBytes(HalfTag(), from));
    return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(wide));
  }

  static HWY_INLINE hn::Vec<HalfTag> Narrow(Float v) {
    const UintTag du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF)));
    const auto quiet = hn::Or(bits, hn::Set(du, kQuietBit));
    const auto nan = hn::RebindMask(du, hn::IsNaN(v));
    return Low16(hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded)));
  }
};

struct F16 {
  static constexpr size_t kBytes = 2;

#if TIDE_HAVE_F16_CONVERSION
  static HWY_INLINE Float Load(const uint8_t* from) {
    const hn::Rebind<hwy::float16_t, FloatTag> d16;
    return hn::PromoteTo(FloatTag(), hn::BitCast(d16, LoadBytes(HalfTag(), from)));
  }

  static HWY_INLINE hn::Vec<HalfTag> Narrow(Float v) {
    const hn::Rebind<hwy::float16_t, FloatTag> d16;
    return hn::BitCast(HalfTag(), hn::DemoteTo(d16, v));
  }
#else
  static HWY_INLINE Float Load(const uint8_t* from) {
    const UintTag du;
    const FloatTag df;
    const auto half = hn::PromoteTo(du, LoadBytes(HalfTag(), from));
    const auto magnitude = hn::And(half, hn::Set(du, 0x7FFF));
    const auto sign = hn::ShiftLeft<16>(hn::Xor(half, magnitude));
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto normal = hn::Add(shifted, hn::Set(du, (127u - 15u) << 23));
    // A denormal is m * 2^-24: let the FPU normalise it by subtracting the implicit one of 2^-14.
    const auto one = hn::Set(du, 113u << 23);
    const auto denormal =
        hn::BitCast(du, hn::Sub(hn::BitCast(df, hn::Add(shifted, one)), hn::BitCast(df, one)));
    const auto special = hn::Or(shifted, hn::Set(du, kInfinityBits));
    const auto quiet = hn::Or(special, hn::Set(du, kQuietBit));
    auto bits = hn::IfThenElse(Less(magnitude, 0x0400), denormal, normal);
    bits = hn::IfThenElse(Less(magnitude, 0x7C00), bits, special);
    bits = hn::IfThenElse(Less(magnitude, 0x7C01), bits, quiet);
    return hn::BitCast(df, hn::Or(bits, sign));
  }

  static HWY_INLINE hn::Vec<HalfTag> Narrow(Float v) {
    const UintTag du;
    const FloatTag df;
    const auto all = hn::BitCast(du, v);
    const auto bits = hn::And(all, hn::Set(du, 0x7FFFFFFFu));
    const auto sign = hn::ShiftRight<16>(hn::Xor(all, bits));
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(du, 1));
    // Modulo 2^32 this subtracts the difference of the exponent biases.
    const auto rebias = hn::Set(du, ((15u - 127u) << 23) + 0xFFFu);
    const auto normal = hn::ShiftRight<13>(hn::Add(bits, hn::Add(rebias, odd)));
    // Adding 0.5 makes the FPU round at 2^-24, the weight of the last bit of a denormal fp16.
    const auto half = hn::Set(du, 126u << 23);
    const auto denormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, bits), hn::BitCast(df, half))), half);
    const auto payload = hn::And(hn::ShiftRight<13>(bits), hn::Set(du, 0x3FF));
    const auto nan = hn::Or(payload, hn::Set(du, 0x7E00));
    auto result = hn::IfThenElse(Less(bits, 113u << 23), denormal, normal);
    result = hn::IfThenElse(Less(bits, 143u << 23), result, hn::Set(du, 0x7C00));
    result = hn::IfThenElse(Less(bits, kInfinityBits + 1), result, nan);
    return Low16(hn::Or(result, sign));
  }

 private:
  // Values below 2^31 only: comparisons of signed lanes exist everywhere.
  static HWY_INLINE hn::Mask<UintTag> Less(hn::Vec<UintTag> v, uint32_t limit) {
    const IntTag di;
    return hn::RebindMask(UintTag(),
                          hn::Lt(hn::BitCast(di, v), hn::Set(di, static_cast<int32_t>(limit))));
  }
#endif
};

// Reaching past the end of a source is harmless: prefetches never fault.
HWY_INLINE void PrefetchLines(const uint8_t* from, size_t bytes) {
  for (size_t line = 0; line < bytes; line += kCacheLineBytes) hwy::Prefetch(from + line);
}

// Scalable vectors fit neither into arrays nor into structs, hence four of everything.
constexpr size_t kBlockVectors = 4;
HWY_INLINE size_t BlockElems() { return kBlockVectors * hn::Lanes(FloatTag()); }
constexpr size_t kMaxBlockBytes = kBlockVectors * hn::MaxLanes(FloatTag()) * sizeof(float);

template <class Type>
HWY_INLINE void LoadBlock(const uint8_t* from, Float& v0, Float& v1, Float& v2, Float& v3) {
  const size_t step = hn::Lanes(FloatTag()) * Type::kBytes;
  v0 = Type::Load(from);
  v1 = Type::Load(from + step);
  v2 = Type::Load(from + 2 * step);
  v3 = Type::Load(from + 3 * step);
}

template <class Type, bool kStream>
HWY_INLINE void StoreBlock(Float v0, Float v1, Float v2, Float v3, uint8_t* to) {
  const size_t step = hn::Lanes(FloatTag()) * sizeof(float);  // whole vectors in either case
  if constexpr (Type::kBytes == sizeof(float)) {
    const FloatTag d;
    StoreBytes<kStream>(v0, d, to);
    StoreBytes<kStream>(v1, d, to + step);
    StoreBytes<kStream>(v2, d, to + 2 * step);
    StoreBytes<kStream>(v3, d, to + 3 * step);
  } else {
    const HalfPairTag d;
    StoreBytes<kStream>(hn::Combine(d, Type::Narrow(v1), Type::Narrow(v0)), d, to);
    StoreBytes<kStream>(hn::Combine(d, Type::Narrow(v3), Type::Narrow(v2)), d, to + step);
  }
}

// As LoadBlock for the first `elems` elements of a block; the others are zero.
template <class Type>
HWY_INLINE void LoadPart(const uint8_t* from, size_t elems, Float& v0, Float& v1, Float& v2,
                         Float& v3) {
  alignas(kCacheLineBytes) uint8_t padded[kMaxBlockBytes] = {};
  std::memcpy(padded, from, elems * Type::kBytes);
  LoadBlock<Type>(padded, v0, v1, v2, v3);
}

template <class Type>
HWY_INLINE void StorePart(Float v0, Float v1, Float v2, Float v3, uint8_t* to, size_t elems) {
  alignas(kCacheLineBytes) uint8_t padded[kMaxBlockBytes];
  StoreBlock<Type, false>(v0, v1, v2, v3, padded);
  std::memcpy(to, padded, elems * Type::kBytes);
}

// Runs kernel.Part(first, elems) and kernel.template Blocks<kStream>(first, blocks) over [0, elems)
// such that blocks that bypass the caches start at a cache line of `out`, whose elements have
// `out_elem_bytes`.
template <class Kernel>
HWY_INLINE void ForBlocks(const Kernel& kernel, const uint8_t* out, size_t out_elem_bytes,
                          size_t elems) {
  const size_t block = BlockElems();
  const size_t to_line = BytesToCacheLine(out);
  const bool stream = elems * out_elem_bytes >= kStreamBytes && to_line % out_elem_bytes == 0;
  size_t first = 0;
  const size_t head = stream ? to_line / out_elem_bytes : 0;
  while (first < head) {
    const size_t part = HWY_MIN(block, head - first);
    kernel.Part(first, part);
    first += part;
  }
  const size_t blocks = (elems - first) / block;
  if (stream) {
    kernel.template Blocks<true>(first, blocks);
  } else {
    kernel.template Blocks<false>(first, blocks);
  }
  first += blocks * block;
  if (first < elems) kernel.Part(first, elems - first);
}

}  // namespace HWY_NAMESPACE
}  // namespace tide::kernels::internal
HWY_AFTER_NAMESPACE();

#endif  // TIDE_KERNELS_HOST_CONVERT_INL_H_
