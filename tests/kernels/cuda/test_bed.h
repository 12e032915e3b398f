// The same batch on the host and on the device, over equal memory: everything must come out equal,
// also what lies between the operands.
#ifndef TIDE_TESTS_KERNELS_CUDA_TEST_BED_H_
#define TIDE_TESTS_KERNELS_CUDA_TEST_BED_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"
#include "kernels/host/kernels.h"
#include "kernels/reference.h"
#include "tide/error.h"

namespace tide::kernels::cuda::testing {

using kernels::testing::kFloatTypes;

// Skips, with the reason, where no GPU is.
class CudaTest : public ::testing::Test {
 public:
  // The paths of a sum that this GPU has; multicast needs an address that only a fabric can make.
  static std::vector<SumPath> Paths() {
    std::vector<SumPath> paths;
    for (const SumPath path : {SumPath::kPlain, SumPath::kBulk}) {
      try {
        SumBatch({}, path);
        paths.push_back(path);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kUnsupported) throw;
      }
    }
    return paths;
  }

 protected:
  void SetUp() override {
    if (const std::string reason = NoDeviceReason(); !reason.empty()) {
      GTEST_SKIP() << "needs a GPU: " << reason;
    }
  }
};

class TestBed {
 public:
  // A place of `elems` elements, `shift` elements past a multiple of 256 bytes, filled with small
  // numbers and, every `raw_every`-th element (0: never), any bit pattern. Returns the operand: the
  // place has a base pointer of its own.
  Operand Place(DType dtype, int64_t elems, int64_t shift, size_t raw_every) {
    const int base = static_cast<int>(places_.size());
    const auto item = static_cast<int64_t>(ItemSize(dtype));
    const size_t begin = (image_.size() + kGap + 255) / 256 * 256;
    image_.resize(begin + static_cast<size_t>((shift + elems) * item) + kGap, uint8_t{0xA5});
    kernels::testing::Guarded values(dtype, static_cast<size_t>(elems), 0);
    values.Fill(static_cast<uint32_t>(base * 1000 + elems), raw_every);
    // Half of the places are shifted by their base pointer, half by their offset.
    const int64_t in_base = base % 2 == 0 ? shift * item : 0;
    std::memcpy(image_.data() + begin + shift * item, values.data(), values.bytes());
    places_.push_back({begin + static_cast<size_t>(in_base), dtype, elems, shift * item - in_base});
    return {base, shift * item - in_base};
  }

  void Sum(const std::vector<SumItem>& items, const SumCall& call, SumPath path) {
    const SumBatch batch(items, path);
    Upload();
    const auto bases = Bases<const void*>(device_->data());
    batch.Launch(bases.data(), call, stream_.get());
    for (const SumItem& item : items) {
      std::vector<const void*> sources;
      for (const Operand& source : item.sources) sources.push_back(OnHost(source));
      kernels::Sum(OnHost(item.dst), item.dst_dtype, sources.data(), sources.size(), item.src_dtype,
                   call.scale, call.accumulate, static_cast<size_t>(item.elems));
    }
    Compare();
  }

  void Cast(const std::vector<SumItem>& items, SumPath path) {
    const SumBatch batch(items, path);
    Upload();
    const auto bases = Bases<const void*>(device_->data());
    batch.Launch(bases.data(), {}, stream_.get());
    for (const SumItem& item : items) {
      kernels::Cast(OnHost(item.dst), item.dst_dtype, OnHost(item.sources[0]), item.src_dtype,
                    static_cast<size_t>(item.elems));
    }
    Compare();
  }

  void Zero(const std::vector<ZeroItem>& items, int ctas) {
    const ZeroBatch batch(items);
    Upload();
    const auto bases = Bases<void*>(device_->data());
    batch.Launch(bases.data(), ctas, stream_.get());
    for (const ZeroItem& item : items) {
      kernels::Zero(OnHost(item.dst), static_cast<size_t>(item.bytes));
    }
    Compare();
  }

 private:
  static constexpr size_t kGap = 64;

  struct At {
    size_t begin;  // of the base pointer in the image
    DType dtype;
    int64_t elems;
    int64_t offset;  // of the operand
  };

  void* OnHost(const Operand& operand) {
    return image_.data() + places_[static_cast<size_t>(operand.base)].begin + operand.offset;
  }

  template <class Pointer>
  std::vector<Pointer> Bases(uint8_t* memory) const {
    std::vector<Pointer> bases;
    for (const At& place : places_) bases.push_back(memory + place.begin);
    return bases;
  }

  void Upload() {
    device_ = std::make_unique<DeviceMemory>(image_.size());
    device_->CopyFrom(image_.data());
  }

  // Bit for bit, but any NaN equals any other of its type.
  void Compare() {
    Synchronise(stream_.get());
    std::vector<uint8_t> got(image_.size());
    device_->CopyTo(got.data());
    for (const At& place : places_) {
      if (place.dtype == DType::kU8) continue;
      const size_t item = ItemSize(place.dtype);
      for (int64_t i = 0; i < place.elems; ++i) {
        const size_t at =
            place.begin + static_cast<size_t>(place.offset) + static_cast<size_t>(i) * item;
        ASSERT_TRUE(kernels::testing::SameElement(place.dtype, got.data() + at, image_.data() + at))
            << "place " << &place - places_.data() << ", element " << i << " of " << place.elems;
        std::memcpy(got.data() + at, image_.data() + at, item);
      }
    }
    ASSERT_TRUE(got == image_) << "bytes beside the operands have changed";
  }

  std::vector<uint8_t> image_;
  std::vector<At> places_;
  std::unique_ptr<DeviceMemory> device_;
  OwnedStream stream_;
};

}  // namespace tide::kernels::cuda::testing

#endif  // TIDE_TESTS_KERNELS_CUDA_TEST_BED_H_
