#include <cstring>

#include "kernels/host/kernels.h"
#include "kernels/host/stream.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/copy.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tide::kernels::internal {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Copies whole blocks of four cache lines to a line-aligned destination. Returns the bytes copied.
size_t StreamCopy(uint8_t* HWY_RESTRICT dst, const uint8_t* HWY_RESTRICT src, size_t bytes) {
  constexpr size_t kBlockBytes = 4 * kCacheLineBytes;
  const hn::CappedTag<uint8_t, kCacheLineBytes> d;
  const size_t lanes = hn::Lanes(d);
  size_t done = 0;
  for (; done + kBlockBytes <= bytes; done += kBlockBytes) {
    // Prefetches past the end are harmless: they never fault.
    for (size_t line = 0; line < kBlockBytes; line += kCacheLineBytes) {
      hwy::Prefetch(src + done + kPrefetchBytes + line);
    }
    for (size_t i = 0; i < kBlockBytes; i += lanes) {
      hn::Stream(hn::LoadU(d, src + done + i), d, dst + done + i);
    }
  }
  return done;
}

size_t StreamZero(uint8_t* dst, size_t bytes) {
  const hn::CappedTag<uint8_t, kCacheLineBytes> d;
  const size_t lanes = hn::Lanes(d);
  const auto zero = hn::Zero(d);
  size_t done = 0;
  for (; done + kCacheLineBytes <= bytes; done += kCacheLineBytes) {
    for (size_t i = 0; i < kCacheLineBytes; i += lanes) {
      hn::Stream(zero, d, dst + done + i);
    }
  }
  return done;
}

const char* CompiledTargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace tide::kernels::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tide::kernels {
namespace internal {
namespace {

HWY_EXPORT(StreamCopy);
HWY_EXPORT(StreamZero);
HWY_EXPORT(CompiledTargetName);

// Copies all but head and tail of a large range. Returns the bytes copied.
size_t CopyLines(uint8_t* dst, const uint8_t* src, size_t bytes) {
  return HWY_DYNAMIC_DISPATCH(StreamCopy)(dst, src, bytes);
}

size_t ZeroLines(uint8_t* dst, size_t bytes) {
  return HWY_DYNAMIC_DISPATCH(StreamZero)(dst, bytes);
}

const char* ChosenTargetName() { return HWY_DYNAMIC_DISPATCH(CompiledTargetName)(); }

}  // namespace
}  // namespace internal

void Copy(void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  if (bytes < internal::kStreamBytes) {
    std::memcpy(dst, src, bytes);
    return;
  }
  auto* to = static_cast<uint8_t*>(dst);
  const auto* from = static_cast<const uint8_t*>(src);
  const size_t head = internal::BytesToCacheLine(dst);
  std::memcpy(to, from, head);
  const size_t done = head + internal::CopyLines(to + head, from + head, bytes - head);
  std::memcpy(to + done, from + done, bytes - done);
}

void Zero(void* dst, size_t bytes) {
  if (bytes == 0) return;
  if (bytes < internal::kStreamBytes) {
    std::memset(dst, 0, bytes);
    return;
  }
  auto* to = static_cast<uint8_t*>(dst);
  const size_t head = internal::BytesToCacheLine(dst);
  std::memset(to, 0, head);
  const size_t done = head + internal::ZeroLines(to + head, bytes - head);
  std::memset(to + done, 0, bytes - done);
}

// Ordinary stores are ordered by the release store that follows.
void StoreFence() { hwy::FlushStream(); }

const char* TargetName() { return internal::ChosenTargetName(); }

}  // namespace tide::kernels
#endif  // HWY_ONCE
