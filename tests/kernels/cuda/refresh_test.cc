// Refreshes, one after the other over the same memory: what has changed since the one before is
// written to dst and to its copies, and little else.
#include <algorithm>
#include <map>
#include <random>

#include "kernels/cuda/table.h"
#include "kernels/cuda/test_bed.h"

namespace tide::kernels::cuda::testing {
namespace {

using CudaRefresh = CudaTest;
using kernels::testing::SameElement;

struct Shape {
  DType to = DType::kBF16;
  DType from = DType::kF32;
  int64_t elems = 0;
  int64_t to_shift = 0;  // elements from an aligned address
  int64_t from_shift = 0;
  int n_copies = 2;
};

// The conversions of a refresh.
std::vector<Shape> Conversions() {
  std::vector<Shape> shapes = {{DType::kU8, DType::kU8}};
  for (const DType to : kFloatTypes) {
    for (const DType from : kFloatTypes) shapes.push_back({to, from});
  }
  return shapes;
}

// Few elements that are written together: one vector of them.
int64_t GroupElems(DType dtype) {
  return dtype == DType::kF32 ? 4 : 8 / static_cast<int64_t>(ItemSize(dtype));
}

class RefreshBed {
 public:
  RefreshBed(const std::vector<Shape>& shapes, unsigned seed) : random_(seed) {
    for (const Shape& shape : shapes) Place(shape);
    device_ = std::make_unique<DeviceMemory>(image_.size());
  }

  // Changes about one in `every` elements of the sources to any bits.
  void Change(unsigned every) {
    for (const Placed& placed : placed_) {
      const size_t item = ItemSize(placed.shape.from);
      for (int64_t i = 0; i < placed.shape.elems; ++i) {
        if (random_() % every != 0) continue;
        const auto bits = static_cast<uint32_t>(random_());
        std::memcpy(&image_[placed.source + static_cast<size_t>(i) * item], &bits, item);
      }
    }
  }

  // Returns how many elements were found to differ.
  int64_t Refresh(int ctas) {
    for (const Placed& placed : placed_) SpoilCopies(placed);
    std::vector<const void*> bases;
    for (const size_t base : bases_) bases.push_back(device_->data() + base);
    device_->CopyFrom(image_.data());
    RefreshBatch(items_).Launch(bases.data(), ctas, stream_.get());
    Synchronise(stream_.get());
    std::vector<uint8_t> got(image_.size());
    device_->CopyTo(got.data());
    int64_t differed = 0;
    for (const Placed& placed : placed_) {
      differed += Check(placed, got);
      if (::testing::Test::HasFailure()) return differed;
    }
    EXPECT_TRUE(got == image_) << "bytes beside the operands have changed";
    return differed;
  }

 private:
  static constexpr size_t kGap = 64;

  struct Placed {
    Shape shape;
    size_t dst;  // bytes into the image
    size_t source;
    std::vector<size_t> copies;
  };

  // Adds an operand; half of them are shifted by their base pointer, half by their offset.
  Operand Place(DType dtype, int64_t elems, int64_t shift, bool in_base, size_t* at) {
    const auto item = static_cast<int64_t>(ItemSize(dtype));
    const size_t begin = (image_.size() + kGap + 255) / 256 * 256;
    *at = begin + static_cast<size_t>(shift * item);
    image_.resize(*at + static_cast<size_t>(elems * item) + kGap);
    for (size_t i = begin; i < image_.size(); ++i) image_[i] = static_cast<uint8_t>(random_());
    bases_.push_back(in_base ? *at : begin);
    return {static_cast<int>(bases_.size()) - 1, in_base ? 0 : shift * item};
  }

  void Place(const Shape& shape) {
    const bool in_base = placed_.size() % 2 == 0;
    Placed placed{shape, 0, 0, std::vector<size_t>(static_cast<size_t>(shape.n_copies))};
    SumItem item{.elems = shape.elems, .dst_dtype = shape.to, .src_dtype = shape.from};
    item.dst = Place(shape.to, shape.elems, shape.to_shift, in_base, &placed.dst);
    item.sources = {
        Place(shape.from, shape.elems, shape.from_shift, random_() % 2 == 0, &placed.source)};
    for (size_t& copy : placed.copies) {
      item.copies.push_back(Place(shape.to, shape.elems, shape.to_shift, in_base, &copy));
    }
    items_.push_back(std::move(item));
    placed_.push_back(std::move(placed));
  }

  // By the host. NaNs may come out otherwise on the device.
  std::vector<uint8_t> Wanted(const Placed& placed) const {
    std::vector<uint8_t> wanted(static_cast<size_t>(placed.shape.elems) *
                                ItemSize(placed.shape.to));
    kernels::Cast(wanted.data(), placed.shape.to, &image_[placed.source], placed.shape.from,
                  static_cast<size_t>(placed.shape.elems));
    return wanted;
  }

  // No element is what it would be if it were written: ~NaN is no NaN.
  void SpoilCopies(const Placed& placed) {
    std::vector<uint8_t> spoilt = Wanted(placed);
    for (uint8_t& byte : spoilt) byte = static_cast<uint8_t>(~byte);
    for (const size_t copy : placed.copies) std::copy(spoilt.begin(), spoilt.end(), &image_[copy]);
  }

  // Takes what is right from `got` into the image.
  int64_t Check(const Placed& placed, const std::vector<uint8_t>& got) {
    const Shape& shape = placed.shape;
    const size_t item = ItemSize(shape.to);
    const std::vector<uint8_t> wanted = Wanted(placed);
    std::vector<bool> differs(static_cast<size_t>(shape.elems));
    std::map<int64_t, bool> group_differs;
    const auto group = [&](size_t i) {
      return (shape.to_shift + static_cast<int64_t>(i)) / GroupElems(shape.to);
    };
    for (size_t i = 0; i < differs.size(); ++i) {
      const uint8_t* now = &got[placed.dst + i * item];
      const bool right = shape.to == shape.from
                             ? std::memcmp(now, &wanted[i * item], item) == 0
                             : bool{SameElement(shape.to, now, &wanted[i * item])};
      if (!right) {
        ADD_FAILURE() << "dst, " << Where(placed, i);
        return 0;
      }
      differs[i] = std::memcmp(now, &image_[placed.dst + i * item], item) != 0;
      if (differs[i]) group_differs[group(i)] = true;
    }
    for (const size_t copy : placed.copies) {
      for (size_t i = 0; i < differs.size(); ++i) {
        const uint8_t* now = &got[copy + i * item];
        const bool untouched = std::memcmp(now, &image_[copy + i * item], item) == 0;
        const bool written = std::memcmp(now, &got[placed.dst + i * item], item) == 0;
        const bool allowed = written ? group_differs.count(group(i)) > 0 : untouched && !differs[i];
        if (!allowed) {
          ADD_FAILURE() << "copy, " << Where(placed, i)
                        << (written ? ", written" : ", not written");
          return 0;
        }
      }
      std::copy_n(&got[copy], wanted.size(), &image_[copy]);
    }
    std::copy_n(&got[placed.dst], wanted.size(), &image_[placed.dst]);
    return std::count(differs.begin(), differs.end(), true);
  }

  static std::string Where(const Placed& placed, size_t element) {
    const Shape& shape = placed.shape;
    return std::string(Name(shape.to)) + " from " + Name(shape.from) + ", shifts " +
           std::to_string(shape.to_shift) + " and " + std::to_string(shape.from_shift) +
           ", element " + std::to_string(element) + " of " + std::to_string(shape.elems);
  }

  std::mt19937 random_;
  std::vector<uint8_t> image_;
  std::vector<size_t> bases_;
  std::vector<Placed> placed_;
  std::vector<SumItem> items_;
  std::unique_ptr<DeviceMemory> device_;
  OwnedStream stream_;
};

// All, nothing, some, few.
void ExpectRefreshes(const std::vector<Shape>& shapes, int ctas) {
  SCOPED_TRACE("CTAs " + std::to_string(ctas));
  RefreshBed bed(shapes, /*seed=*/17);
  EXPECT_GT(bed.Refresh(ctas), 0);
  EXPECT_EQ(bed.Refresh(ctas), 0);
  bed.Change(20);
  EXPECT_GT(bed.Refresh(ctas), 0);
  EXPECT_EQ(bed.Refresh(ctas), 0);
  bed.Change(500);
  bed.Refresh(ctas);
}

TEST_F(CudaRefresh, AllTypesAndSmallSizes) {
  std::vector<Shape> shapes;
  for (const Shape& types : Conversions()) {
    for (int64_t elems = 0; elems <= 40; ++elems) {
      const int64_t shift = elems * 5 % 17;
      shapes.push_back({types.to, types.from, elems, shift, shift, static_cast<int>(elems % 4)});
    }
  }
  for (const int ctas : {1, 7}) ExpectRefreshes(shapes, ctas);
}

TEST_F(CudaRefresh, EdgesOfTiles) {
  std::vector<Shape> shapes;
  for (const Shape& types : Conversions()) {
    const int64_t tile = internal::TileElems(types.from);
    for (const int64_t elems : {tile - 1, tile, tile + 1, tile + 8, 3 * tile + 5}) {
      for (const int64_t shift : {0, 1, 4, 7}) {
        shapes.push_back({types.to, types.from, elems, shift, shift});
      }
    }
  }
  ExpectRefreshes(shapes, 7);
}

TEST_F(CudaRefresh, OperandsThatAreNeverAlignedTogether) {
  std::vector<Shape> shapes;
  for (const Shape& types : Conversions()) {
    for (const int64_t elems : {1, 37, 20011}) {
      shapes.push_back({types.to, types.from, elems, 0, 1});
      shapes.push_back({types.to, types.from, elems, 3, 0});
    }
  }
  ExpectRefreshes(shapes, 5);
}

TEST_F(CudaRefresh, EveryBudgetOfCtas) {
  std::vector<Shape> shapes;
  for (const Shape& types : Conversions()) {
    shapes.push_back({types.to, types.from, 50021, 0, 0, 3});
    shapes.push_back({types.to, types.from, 3, 1, 1, 1});
  }
  for (const int ctas : {1, 3, 132, 528, 2000}) ExpectRefreshes(shapes, ctas);
}

// More base pointers than one launch has.
TEST_F(CudaRefresh, ThousandsOfTensors) {
  std::vector<Shape> shapes;
  for (int i = 0; i < 2000; ++i) {
    const int64_t shift = i % 3 == 0 ? 1 : 0;
    shapes.push_back(
        {DType::kBF16, i % 2 == 0 ? DType::kF32 : DType::kBF16, 1 + i * 7 % 301, shift, shift, 3});
  }
  ExpectRefreshes(shapes, 16);
}

TEST_F(CudaRefresh, RefusesWhatItCannotDo) {
  const SumItem good{.dst = {0, 0},
                     .sources = {{1, 0}},
                     .elems = 4,
                     .dst_dtype = DType::kBF16,
                     .copies = {{2, 16}}};
  RefreshBatch({good});
  SumItem item = good;
  item.src_dtype = DType::kU8;
  EXPECT_THROW(RefreshBatch({item}), Error);
  item = good;
  item.sources.clear();
  EXPECT_THROW(RefreshBatch({item}), Error);
  item = good;
  item.sources.push_back({3, 0});
  EXPECT_THROW(RefreshBatch({item}), Error);
  item = good;
  item.copies[0].offset = 2;
  EXPECT_THROW(RefreshBatch({item}), Error);
}

}  // namespace
}  // namespace tide::kernels::cuda::testing
