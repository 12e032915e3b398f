// Casts, which are sums of one source, and zeroing.
#include <numeric>

#include "kernels/cuda/test_bed.h"

namespace tide::kernels::cuda::testing {
namespace {

using CudaCast = CudaTest;
using CudaZero = CudaTest;

TEST_F(CudaCast, EveryPatternOfEveryType) {
  for (const SumPath path : Paths()) {
    SCOPED_TRACE(Name(path));
    TestBed bed;
    std::vector<SumItem> items;
    for (const DType from : kFloatTypes) {
      for (const DType to : kFloatTypes) {
        for (const int64_t elems : {1, 77, 300007}) {
          // Every element is any bit pattern.
          const Operand source = bed.Place(from, elems, elems % 5, 1);
          const Operand dst = bed.Place(to, elems, elems % 5, 1);
          items.push_back({dst, {source}, elems, to, from});
        }
      }
    }
    bed.Cast(items, path);
  }
}

TEST_F(CudaZero, AnySizeAndAlignment) {
  for (const int ctas : {1, 5, 200}) {
    SCOPED_TRACE(ctas);
    TestBed bed;
    std::vector<ZeroItem> items;
    for (int64_t bytes = 0; bytes <= 40; ++bytes) {
      items.push_back({bed.Place(DType::kU8, bytes, bytes * 7 % 17, 1), bytes});
    }
    for (const int64_t bytes : {16383, 16384, 16385, 1000003}) {
      for (const int64_t shift : {0, 1, 8, 15}) {
        items.push_back({bed.Place(DType::kU8, bytes, shift, 1), bytes});
      }
    }
    bed.Zero(items, ctas);
  }
}

}  // namespace
}  // namespace tide::kernels::cuda::testing
