// Counts what the calling thread takes from the heap. Replaces the global operators new and delete,
// so that one file of a test includes it.
#ifndef TIDE_TESTS_TESTING_COUNT_ALLOCATIONS_H_
#define TIDE_TESTS_TESTING_COUNT_ALLOCATIONS_H_

#include <cstdint>
#include <cstdlib>
#include <new>

namespace tide::testing {

inline thread_local int64_t allocations = 0;

}  // namespace tide::testing

// Aligned and array forms end here or in the library's own; the calls under test use neither. Not
// inline: where g++ inlines one of a pair alone, it takes the other for a mismatch.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++tide::testing::allocations;
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t /*bytes*/) noexcept {
  std::free(memory);
}

#endif  // TIDE_TESTS_TESTING_COUNT_ALLOCATIONS_H_
