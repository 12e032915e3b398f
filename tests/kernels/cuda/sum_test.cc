#include <cmath>

#include "kernels/cuda/table.h"
#include "kernels/cuda/test_bed.h"
#include "tide/error.h"

namespace tide::kernels::cuda::testing {
namespace {

using CudaSum = CudaTest;

struct Shape {
  DType dst_dtype = DType::kF32;
  DType src_dtype = DType::kBF16;
  int n_sources = 2;
  int64_t elems = 0;
  int64_t dst_shift = 0;  // elements from an aligned address
  int64_t src_shift = 0;  // of every source
  int64_t src_step = 0;   // more for each further source
  size_t raw_every = 5;
};

SumItem Place(TestBed& bed, const Shape& shape) {
  SumItem item{.elems = shape.elems, .dst_dtype = shape.dst_dtype, .src_dtype = shape.src_dtype};
  item.dst = bed.Place(shape.dst_dtype, shape.elems, shape.dst_shift, shape.raw_every);
  for (int s = 0; s < shape.n_sources; ++s) {
    item.sources.push_back(bed.Place(shape.src_dtype, shape.elems,
                                     shape.src_shift + s * shape.src_step,
                                     shape.raw_every == 0 ? 0 : shape.raw_every + s));
  }
  return item;
}

// One batch of all shapes, on every path, storing and accumulating.
void ExpectSums(const std::vector<Shape>& shapes, int ctas = 7) {
  for (const SumPath path : CudaTest::Paths()) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(std::string(Name(path)) + (accumulate ? ", accumulate" : ""));
      TestBed bed;
      std::vector<SumItem> items;
      for (const Shape& shape : shapes) items.push_back(Place(bed, shape));
      bed.Sum(items, {.scale = 1.0f / 3, .accumulate = accumulate, .ctas = ctas}, path);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaSum, AllTypesAndSmallSizes) {
  std::vector<Shape> shapes;
  for (const DType dst : kFloatTypes) {
    for (const DType src : kFloatTypes) {
      for (int64_t elems = 0; elems <= 80; ++elems) {
        const int64_t shift = elems * 5 % 9;
        shapes.push_back({dst, src, static_cast<int>(1 + elems % 9), elems, shift, shift});
      }
    }
  }
  ExpectSums(shapes);
}

TEST_F(CudaSum, EveryCountOfSources) {
  std::vector<Shape> shapes;
  for (const DType src : kFloatTypes) {
    for (const int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 33}) {
      shapes.push_back({DType::kF32, src, n, 20011});
    }
  }
  ExpectSums(shapes);
}

TEST_F(CudaSum, EdgesOfTiles) {
  std::vector<Shape> shapes;
  for (const DType dst : kFloatTypes) {
    for (const DType src : kFloatTypes) {
      const int64_t tile = internal::TileElems(src);
      for (const int64_t elems : {tile - 1, tile, tile + 1, tile + 8, 3 * tile + 5}) {
        for (const int64_t shift : {0, 1, 3, 4, 7}) {
          shapes.push_back({dst, src, 2, elems, shift, shift});
        }
      }
    }
  }
  ExpectSums(shapes);
}

TEST_F(CudaSum, OperandsThatAreNeverAlignedTogether) {
  std::vector<Shape> shapes;
  for (const DType dst : kFloatTypes) {
    for (const DType src : kFloatTypes) {
      for (const int64_t elems : {1, 37, 20011}) {
        shapes.push_back({dst, src, 3, elems, 0, 1, 0});
        shapes.push_back({dst, src, 3, elems, 0, 0, 1});
        shapes.push_back({dst, src, 3, elems, 3, 1, 2});
      }
    }
  }
  ExpectSums(shapes);
}

TEST_F(CudaSum, ThousandsOfTensors) {
  std::vector<Shape> shapes;
  for (int i = 0; i < 5000; ++i) {
    shapes.push_back({DType::kF32, DType::kBF16, 2, 1 + i * 7 % 301, i % 3 == 0 ? 1 : 0,
                      i % 3 == 0 ? 1 : 0, 0, 0});
  }
  ExpectSums(shapes, 16);
}

TEST_F(CudaSum, EveryBudgetOfCtas) {
  for (const int ctas : {1, 2, 3, 16, 64, 132, 1000}) {
    SCOPED_TRACE(ctas);
    ExpectSums({{.n_sources = 8, .elems = 300001},
                {.n_sources = 1, .elems = 3},
                {.src_dtype = DType::kF32, .elems = 100003}},
               ctas);
  }
}

TEST_F(CudaSum, MayWriteOverASource) {
  for (const SumPath path : Paths()) {
    for (const DType dtype : kFloatTypes) {
      SCOPED_TRACE(std::string(Name(path)) + ", " + Name(dtype));
      TestBed bed;
      SumItem item = Place(bed, {dtype, dtype, 3, 50021});
      item.dst = item.sources[1];
      bed.Sum({item}, {.scale = 0.37f, .ctas = 5}, path);
    }
  }
}

TEST_F(CudaSum, FollowsTheListedOrderAndRoundsEachOperation) {
  // 1e8 + -1e8 + 3 depends on the order; (1 + 2^-12)^2 - (1 + 2^-11) is zero unless fused.
  constexpr int kElems = 9001;
  const float one = 1.0f + std::ldexp(1.0f, -12);
  const std::vector<std::vector<float>> values = {
      std::vector<float>(kElems, 1e8f), std::vector<float>(kElems, -1e8f),
      std::vector<float>(kElems, 3.0f), std::vector<float>(kElems, one),
      std::vector<float>(kElems, -(1.0f + std::ldexp(1.0f, -11)))};
  for (const SumPath path : Paths()) {
    SCOPED_TRACE(Name(path));
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    std::vector<const void*> bases;
    for (const auto& value : values) {
      memory.push_back(std::make_unique<DeviceMemory>(kElems * sizeof(float)));
      memory.back()->CopyFrom(value.data());
      bases.push_back(memory.back()->data());
    }
    memory.push_back(std::make_unique<DeviceMemory>(kElems * sizeof(float)));
    bases.push_back(memory.back()->data());
    const auto run = [&](std::vector<Operand> sources, int dst, SumCall call) {
      SumItem item{.dst = {dst, 0}, .sources = std::move(sources), .elems = kElems};
      SumBatch({item}, path).Launch(bases.data(), call, nullptr);
      std::vector<float> result(kElems);
      memory[static_cast<size_t>(dst)]->CopyTo(result.data());
      return result;
    };
    EXPECT_EQ(run({{0, 0}, {1, 0}, {2, 0}}, 5, {}), std::vector<float>(kElems, 3.0f));
    EXPECT_EQ(run({{0, 0}, {2, 0}, {1, 0}}, 5, {}), std::vector<float>(kElems, 0.0f));
    EXPECT_EQ(run({{3, 0}}, 4, {.scale = one, .accumulate = true}),
              std::vector<float>(kElems, 0.0f));
  }
}

TEST_F(CudaSum, OneBatchServesOtherAddressesAndScales) {
  TestBed bed;
  const SumItem item = Place(bed, {.elems = 30011});
  for (const float scale : {1.0f, 0.125f, -3.0f}) {
    for (const SumPath path : Paths()) bed.Sum({item}, {.scale = scale}, path);
  }
}

TEST_F(CudaSum, RefusesWhatItCannotDo) {
  const SumItem good{.dst = {0, 0}, .sources = {{1, 0}}, .elems = 4};
  SumItem item = good;
  item.src_dtype = DType::kU8;
  EXPECT_THROW(SumBatch({item}), Error);
  item = good;
  item.sources.clear();
  EXPECT_THROW(SumBatch({item}), Error);
  item = good;
  item.sources.push_back({2, 0});
  EXPECT_THROW(SumBatch({item}, SumPath::kMulticast), Error);

  const SumBatch batch({good});
  DeviceMemory memory(64);
  const void* bases[] = {memory.data(), memory.data() + 32};
  EXPECT_THROW(batch.Launch(bases, {.ctas = 0}, nullptr), Error);
  bases[1] = memory.data() + 2;  // half an element
  EXPECT_THROW(batch.Launch(bases, {}, nullptr), Error);
  bases[1] = nullptr;
  EXPECT_THROW(batch.Launch(bases, {}, nullptr), Error);
}

}  // namespace
}  // namespace tide::kernels::cuda::testing
