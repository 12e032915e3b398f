// When and how far ahead of the loads to bypass the caches. Shared by all kernels of this folder.
#ifndef TIDE_KERNELS_HOST_STREAM_H_
#define TIDE_KERNELS_HOST_STREAM_H_

#include <cstddef>
#include <cstdint>

namespace tide::kernels::internal {

constexpr size_t kCacheLineBytes = 64;

// Outputs of at least this size bypass the caches. Below it a collective is likely to fit into the
// last-level cache, where ordinary stores are up to three times faster; above it they pay a read of
// every output line.
constexpr size_t kStreamBytes = size_t{64} << 10;

// Distances of software prefetches in a source. Hardware prefetchers stop at page ends; half a page
// hides that. With several sources, lines fetched that far ahead would push each other out of the
// first-level cache.
constexpr size_t kPrefetchBytes = 2048;
constexpr size_t kSumPrefetchBytes = 512;

// Bytes from `address` to the next cache line.
inline size_t BytesToCacheLine(const void* address) {
  return (kCacheLineBytes - reinterpret_cast<uintptr_t>(address) % kCacheLineBytes) %
         kCacheLineBytes;
}

}  // namespace tide::kernels::internal

#endif  // TIDE_KERNELS_HOST_STREAM_H_
