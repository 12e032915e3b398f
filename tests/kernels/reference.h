// Helpers of the kernel tests: slow conversions by definition, guarded buffers, and a loop over
// instruction sets.
#ifndef TIDE_TESTS_KERNELS_REFERENCE_H_
#define TIDE_TESTS_KERNELS_REFERENCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "kernels/host/kernels.h"

namespace tide::kernels::testing {

inline constexpr DType kFloatTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

// Calls body() once for every instruction set that was compiled and runs here.
template <class Body>
void ForEachTarget(const Body& body) {
  const int64_t supported = hwy::SupportedTargets();
  std::set<std::string> seen;
  for (int64_t rest = supported; rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(rest & -rest);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    // A target that was not compiled falls back to the baseline: test that once.
    if (!seen.insert(TargetName()).second) continue;
    SCOPED_TRACE(TargetName());
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_FALSE(seen.empty());
}

// Value of a number with `exponent_bits` and `mantissa_bits`, straight from the IEEE definition.
inline double Decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const bool negative = (bits >> (exponent_bits + mantissa_bits)) & 1;
  double value = 0;
  if (exponent == (1 << exponent_bits) - 1) {
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                          : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return negative ? -value : value;
}

// Nearest number of the format, ties to even: scales to units of the last place and lets rint()
// decide.
inline uint32_t Encode(double value, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  const uint32_t sign = std::signbit(value) ? 1u << (exponent_bits + mantissa_bits) : 0;
  if (std::isnan(value)) return sign | infinity | (1u << (mantissa_bits - 1));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  const double units = std::rint(std::ldexp(magnitude, mantissa_bits - exponent));
  // A carry out of the mantissa moves into the exponent by itself, also from denormal to normal and
  // to infinity.
  const double bits = units + std::ldexp(exponent + bias - 1, mantissa_bits);
  return sign | static_cast<uint32_t>(std::min(bits, static_cast<double>(infinity)));
}

inline float LoadScalar(DType dtype, const uint8_t* from) {
  uint32_t bits = 0;
  std::memcpy(&bits, from, ItemSize(dtype));
  if (dtype == DType::kF32) return std::bit_cast<float>(bits);
  return static_cast<float>(dtype == DType::kBF16 ? Decode(bits, 8, 7) : Decode(bits, 5, 10));
}

inline void StoreScalar(DType dtype, float value, uint8_t* to) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (dtype == DType::kBF16) bits = Encode(value, 8, 7);
  if (dtype == DType::kF16) bits = Encode(value, 5, 10);
  std::memcpy(to, &bits, ItemSize(dtype));
}

// `elems` elements of type `dtype` at a chosen offset from a cache line, between canaries.
class Guarded {
 public:
  Guarded(DType dtype, size_t elems, size_t misalignment)
      : dtype_(dtype),
        bytes_(elems * ItemSize(dtype)),
        storage_(bytes_ + 4 * kGuardBytes, kCanary) {
    const size_t rest = reinterpret_cast<uintptr_t>(storage_.data()) % kGuardBytes;
    begin_ = 2 * kGuardBytes - rest + misalignment % kGuardBytes;
  }

  uint8_t* data() { return storage_.data() + begin_; }
  const uint8_t* data() const { return storage_.data() + begin_; }
  size_t bytes() const { return bytes_; }
  float Get(size_t i) const { return LoadScalar(dtype_, data() + i * ItemSize(dtype_)); }
  void Set(size_t i, float value) { StoreScalar(dtype_, value, data() + i * ItemSize(dtype_)); }

  // Arbitrary bytes would be mostly NaN and huge: mixes small numbers with every `raw_every`-th raw
  // pattern.
  void Fill(uint32_t seed, size_t raw_every) {
    uint32_t state = seed * 2654435761u + 12345u;
    for (size_t i = 0; i * ItemSize(dtype_) < bytes_; ++i) {
      state = state * 1664525u + 1013904223u;
      const uint32_t mixed = state ^ (state >> 15);
      if (raw_every != 0 && i % raw_every == 0) {
        std::memcpy(data() + i * ItemSize(dtype_), &mixed, ItemSize(dtype_));
      } else {
        Set(i, static_cast<float>(static_cast<int32_t>(mixed)) * std::ldexp(1.0f, -28));
      }
    }
  }

  bool CanariesIntact() const {
    for (size_t i = 0; i < storage_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && storage_[i] != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuardBytes = 64;
  static constexpr uint8_t kCanary = 0xA5;
  DType dtype_;
  size_t bytes_;
  std::vector<uint8_t> storage_;
  size_t begin_ = 0;
};

// Bitwise equality, except that any NaN equals any other.
inline ::testing::AssertionResult SameElement(DType dtype, const uint8_t* got,
                                              const uint8_t* want) {
  if (std::memcmp(got, want, ItemSize(dtype)) == 0) return ::testing::AssertionSuccess();
  const float got_value = LoadScalar(dtype, got);
  const float want_value = LoadScalar(dtype, want);
  if (std::isnan(got_value) && std::isnan(want_value)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << Name(dtype) << " " << got_value << " instead of " << want_value;
}

}  // namespace tide::kernels::testing

#endif  // TIDE_TESTS_KERNELS_REFERENCE_H_
