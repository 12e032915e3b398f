#include "kernels/reference.h"
#include "tide/error.h"

namespace tide::kernels::testing {
namespace {

void ExpectCast(DType to, DType from, const Guarded& src, size_t elems, size_t shift) {
  Guarded dst(to, elems, shift);
  Cast(dst.data(), to, src.data(), from, elems);
  for (size_t i = 0; i < elems; ++i) {
    uint8_t want[4] = {};
    StoreScalar(to, src.Get(i), want);
    ASSERT_TRUE(SameElement(to, dst.data() + i * ItemSize(to), want))
        << Name(from) << " " << src.Get(i) << " to " << Name(to) << ", element " << i << " of "
        << elems;
  }
  ASSERT_TRUE(dst.CanariesIntact())
      << Name(from) << " to " << Name(to) << ", " << elems << " elements";
}

TEST(Cast, AllPairsSizesAndAlignments) {
  ForEachTarget([] {
    for (const DType from : kFloatTypes) {
      for (const DType to : kFloatTypes) {
        for (size_t elems = 0; elems <= 300; ++elems) {
          const size_t shift = elems * 5 % 64;
          Guarded src(from, elems, shift * 3);
          src.Fill(static_cast<uint32_t>(elems), 3);
          ExpectCast(to, from, src, elems, shift);
        }
        for (const size_t shift : {0, 1, 2, 4, 62}) {
          const size_t elems = 70001;
          Guarded src(from, elems, shift * 7);
          src.Fill(7, 5);
          ExpectCast(to, from, src, elems, shift);
        }
      }
    }
  });
}

TEST(Cast, EverySixteenBitPattern) {
  ForEachTarget([] {
    for (const DType from : {DType::kBF16, DType::kF16}) {
      Guarded src(from, 65536, 0);
      for (uint32_t bits = 0; bits < 65536; ++bits) std::memcpy(src.data() + 2 * bits, &bits, 2);
      for (const DType to : kFloatTypes) ExpectCast(to, from, src, 65536, 0);
    }
  });
}

// Every 16-bit number, the exact middle to the next one and the fp32 neighbours of both.
TEST(Cast, HalfwayCases) {
  for (const DType to : {DType::kBF16, DType::kF16}) {
    std::vector<float> values;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      uint8_t low[4] = {}, high[4] = {};
      const uint16_t next = static_cast<uint16_t>(bits + 1);
      std::memcpy(low, &bits, 2);
      std::memcpy(high, &next, 2);
      const float a = LoadScalar(to, low);
      const float b = LoadScalar(to, high);
      const float middle = static_cast<float>((static_cast<double>(a) + b) / 2);
      for (const float center : {a, middle}) {
        values.push_back(center);
        values.push_back(std::nextafter(center, INFINITY));
        values.push_back(std::nextafter(center, -INFINITY));
      }
    }
    for (const float edge :
         {65504.0f, 65519.0f, 65520.0f, 65536.0f, 3.38953139e38f, 3.4028235e38f, 1e-45f}) {
      values.push_back(edge);
      values.push_back(-edge);
    }
    Guarded src(DType::kF32, values.size(), 4);
    std::memcpy(src.data(), values.data(), src.bytes());
    ForEachTarget([&] { ExpectCast(to, DType::kF32, src, values.size(), 0); });
  }
}

TEST(Cast, NansStayQuietNans) {
  // Payloads that vanish in the narrow type, or that a rounding increment would turn into infinity
  // or zero.
  const uint32_t patterns[] = {0x7F800001, 0x7FFFFFFF, 0xFF800001,
                               0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF};
  ForEachTarget([&] {
    for (const uint32_t pattern : patterns) {
      uint16_t bf16 = 0, fp16 = 0;
      Cast(&bf16, DType::kBF16, &pattern, DType::kF32, 1);
      Cast(&fp16, DType::kF16, &pattern, DType::kF32, 1);
      const uint32_t sign = pattern >> 31 << 15;
      EXPECT_EQ(bf16, sign | ((pattern >> 16) & 0x7FFF) | 0x7FC0) << std::hex << pattern;
      EXPECT_EQ(fp16, sign | 0x7E00 | ((pattern >> 13) & 0x3FF)) << std::hex << pattern;
    }
  });
}

TEST(Cast, RefusesBytes) {
  uint8_t bytes[4] = {};
  float value = 0;
  EXPECT_THROW(Cast(&value, DType::kF32, bytes, DType::kU8, 1), Error);
  EXPECT_THROW(Cast(bytes, DType::kU8, &value, DType::kF32, 1), Error);
  EXPECT_NO_THROW(Cast(&value, DType::kU8, bytes, DType::kU8, 4));
}

}  // namespace
}  // namespace tide::kernels::testing
