#include "kernels/reference.h"
#include "tide/error.h"

namespace tide::kernels::testing {
namespace {

struct Case {
  DType out_dtype;
  DType source_dtype;
  size_t n_sources;
  float scale;
  bool accumulate;
  size_t elems;
  size_t shift;
  size_t raw_every;
};

// volatile keeps the compiler of the test from contracting or reordering.
float ReferenceElement(const Case& c, const std::vector<Guarded>& sources, float old, size_t i) {
  volatile float sum = sources[0].Get(i);
  for (size_t s = 1; s < sources.size(); ++s) sum = sum + sources[s].Get(i);
  volatile float product = sum * c.scale;
  if (c.accumulate) product = old + product;
  return product;
}

void ExpectSum(const Case& c) {
  SCOPED_TRACE(std::string(Name(c.source_dtype)) + " to " + Name(c.out_dtype) + ", sources " +
               std::to_string(c.n_sources) + ", elems " + std::to_string(c.elems) + ", shift " +
               std::to_string(c.shift) + (c.accumulate ? ", accumulate" : ""));
  std::vector<Guarded> sources;
  std::vector<const void*> pointers;
  for (size_t s = 0; s < c.n_sources; ++s) {
    sources.emplace_back(c.source_dtype, c.elems, c.shift * (s + 3) + s);
    sources.back().Fill(static_cast<uint32_t>(s * 1000 + c.elems),
                        c.raw_every == 0 ? 0 : c.raw_every + s);
  }
  for (const Guarded& source : sources) pointers.push_back(source.data());
  Guarded out(c.out_dtype, c.elems, c.shift);
  out.Fill(99, c.raw_every);
  const std::vector<uint8_t> before(out.data(), out.data() + out.bytes());

  Sum(out.data(), c.out_dtype, pointers.data(), c.n_sources, c.source_dtype, c.scale, c.accumulate,
      c.elems);

  const size_t item = ItemSize(c.out_dtype);
  for (size_t i = 0; i < c.elems; ++i) {
    uint8_t want[4] = {};
    const float old = LoadScalar(c.out_dtype, before.data() + i * item);
    StoreScalar(c.out_dtype, ReferenceElement(c, sources, old, i), want);
    ASSERT_TRUE(SameElement(c.out_dtype, out.data() + i * item, want)) << "element " << i;
  }
  ASSERT_TRUE(out.CanariesIntact());
}

TEST(Sum, AllTypesAndSmallSizes) {
  ForEachTarget([] {
    for (const DType out : kFloatTypes) {
      for (const DType in : kFloatTypes) {
        for (size_t elems = 0; elems <= 300; ++elems) {
          ExpectSum({out, in, 1 + elems % 11, 1.0f / 3, elems % 2 == 1, elems, elems * 5 % 64, 4});
        }
      }
    }
  });
}

TEST(Sum, EveryCountOfSources) {
  ForEachTarget([] {
    for (size_t n = 1; n <= 20; ++n) {
      for (const DType out : kFloatTypes) {
        for (const bool accumulate : {false, true}) {
          ExpectSum({out, DType::kBF16, n, 0.37f, accumulate, 333, 6, 0});
        }
      }
    }
  });
}

TEST(Sum, LargeOutputsOfAnyAlignment) {
  ForEachTarget([] {
    for (const DType out : kFloatTypes) {
      for (const size_t shift : {0, 1, 2, 4, 60}) {
        for (const size_t n : {1, 2, 3, 4, 8, 9}) {
          ExpectSum({out, DType::kBF16, n, 0.25f, shift == 4, 40009, shift, 9});
        }
      }
      ExpectSum({out, DType::kF32, 4, 0.3f, false, 40009, 8, 9});
      ExpectSum({out, DType::kF16, 4, 0.3f, true, 40009, 8, 9});
    }
  });
}

TEST(Sum, FollowsTheListedOrder) {
  const float big = 1e8f, small = 3.0f;
  ForEachTarget([&] {
    const std::vector<float> a(100, big), b(100, -big), c(100, small);
    std::vector<float> out(100);
    const void* cancelled_first[] = {a.data(), b.data(), c.data()};
    Sum(out.data(), DType::kF32, cancelled_first, 3, DType::kF32, 1.0f, false, out.size());
    EXPECT_EQ(out, std::vector<float>(100, small));
    const void* cancelled_last[] = {a.data(), c.data(), b.data()};
    Sum(out.data(), DType::kF32, cancelled_last, 3, DType::kF32, 1.0f, false, out.size());
    EXPECT_EQ(out, std::vector<float>(100, 0.0f));
  });
}

TEST(Sum, RoundsProductAndSumSeparately) {
  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24; a fused multiply-add would keep the last term.
  const float x = 1.0f + std::ldexp(1.0f, -12);
  ForEachTarget([&] {
    const std::vector<float> source(100, x);
    std::vector<float> out(100, -(1.0f + std::ldexp(1.0f, -11)));
    const void* sources[] = {source.data()};
    Sum(out.data(), DType::kF32, sources, 1, DType::kF32, x, true, out.size());
    EXPECT_EQ(out, std::vector<float>(100, 0.0f));
  });
}

TEST(Sum, MayWriteOverASource) {
  ForEachTarget([] {
    std::vector<float> a(777), b(777), want(777);
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<float>(i) * 0.1f;
      b[i] = static_cast<float>(i) * 0.7f;
      want[i] = a[i] + b[i];
    }
    const void* sources[] = {a.data(), b.data()};
    Sum(a.data(), DType::kF32, sources, 2, DType::kF32, 1.0f, false, a.size());
    EXPECT_EQ(a, want);
  });
}

TEST(Sum, NoSourcesAreZero) {
  std::vector<float> out(10, 5.0f);
  Sum(out.data(), DType::kF32, nullptr, 0, DType::kBF16, 2.0f, true, out.size());
  EXPECT_EQ(out, std::vector<float>(10, 5.0f));
  Sum(out.data(), DType::kF32, nullptr, 0, DType::kBF16, 2.0f, false, out.size());
  EXPECT_EQ(out, std::vector<float>(10, 0.0f));
}

TEST(Sum, RefusesBytes) {
  float value = 0;
  const void* sources[] = {&value};
  EXPECT_THROW(Sum(&value, DType::kU8, sources, 1, DType::kF32, 1.0f, false, 1), Error);
  EXPECT_THROW(Sum(&value, DType::kF32, sources, 1, DType::kU8, 1.0f, false, 1), Error);
}

}  // namespace
}  // namespace tide::kernels::testing
