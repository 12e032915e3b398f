#include <atomic>
#include <thread>

#include "kernels/reference.h"

namespace tide::kernels::testing {
namespace {

std::vector<size_t> Sizes() {
  std::vector<size_t> sizes;
  for (size_t bytes = 0; bytes <= 300; ++bytes) sizes.push_back(bytes);
  for (const size_t around : {size_t{4096}, size_t{64} << 10, size_t{300} << 10}) {
    for (const size_t delta : {0, 1, 63, 64, 257}) {
      sizes.push_back(around - delta);
      sizes.push_back(around + delta);
    }
  }
  return sizes;
}

TEST(Copy, EverySizeAndAlignment) {
  ForEachTarget([] {
    for (const size_t bytes : Sizes()) {
      for (const size_t shift : {0, 1, 17, 60}) {
        Guarded src(DType::kU8, bytes, shift * 3);
        Guarded dst(DType::kU8, bytes, shift);
        for (size_t i = 0; i < bytes; ++i)
          src.data()[i] = static_cast<uint8_t>(i * 7 + i / 256 + bytes);
        Copy(dst.data(), src.data(), bytes);
        ASSERT_TRUE(bytes == 0 || std::memcmp(dst.data(), src.data(), bytes) == 0)
            << bytes << " bytes, " << shift;
        ASSERT_TRUE(dst.CanariesIntact()) << bytes << " bytes, shift " << shift;
      }
    }
  });
}

TEST(Zero, EverySizeAndAlignment) {
  ForEachTarget([] {
    for (const size_t bytes : Sizes()) {
      for (const size_t shift : {0, 1, 63}) {
        Guarded dst(DType::kU8, bytes, shift);
        Zero(dst.data(), bytes);
        ASSERT_EQ(std::count(dst.data(), dst.data() + bytes, 0),
                  static_cast<std::ptrdiff_t>(bytes));
        ASSERT_TRUE(dst.CanariesIntact()) << bytes << " bytes, shift " << shift;
      }
    }
  });
}

TEST(Copy, NothingFromNowhere) {
  Copy(nullptr, nullptr, 0);
  Zero(nullptr, 0);
}

TEST(StoreFence, PublishesStreamedBytes) {
  const size_t bytes = size_t{1} << 20;
  std::vector<uint8_t> src(bytes), dst(bytes);
  std::atomic<int> filled{0}, released{0};
  std::thread reader([&] {
    for (int round = 1; round <= 20; ++round) {
      while (filled.load(std::memory_order_acquire) < round) std::this_thread::yield();
      const auto wrong =
          std::find_if(dst.begin(), dst.end(), [&](uint8_t b) { return b != round; });
      EXPECT_EQ(wrong, dst.end()) << "round " << round;
      released.store(round, std::memory_order_release);
    }
  });
  for (int round = 1; round <= 20; ++round) {
    std::fill(src.begin(), src.end(), static_cast<uint8_t>(round));
    Copy(dst.data(), src.data(), bytes);
    StoreFence();
    filled.store(round, std::memory_order_release);
    while (released.load(std::memory_order_acquire) < round) std::this_thread::yield();
  }
  reader.join();
}

}  // namespace
}  // namespace tide::kernels::testing
