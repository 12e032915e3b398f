// When and how far ahead of the loads to bypass the caches. Shared by all kernels of this folder.
#ifndef TIDE_KERNELS_HOST_STREAM_H_
#define TIDE_KERNELS_HOST_STREAM_H_

#include <cstddef>
#include <cstdint>

namespace tide::kernels::internal {

constexpr size_t kCacheLineBytes = 64;

// Outputs of at least this size bypass the caches. Below it a collective is likely to fit into the last-level cache,
// where ordinary stores are up to three times faster; above it they pay a read of every output line.
constexpr size_t kStreamBytes = size_t{64} << 10;

// Distance of software prefetches. Hardware prefetchers stop at page ends; half a page hides that.
constexpr size_t kPrefetchBytes = 2048;

// Bytes from `address` to the next cache line.
inline size_t BytesToCacheLine(const void* address) {
  return (kCacheLineBytes - reinterpret_cast<uintptr_t>(address) % kCacheLineBytes) % kCacheLineBytes;
}

}  // namespace tide::kernels::internal

#endif  // TIDE_KERNELS_HOST_STREAM_H_
