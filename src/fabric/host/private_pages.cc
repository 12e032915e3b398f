#include "fabric/host/private_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tide/error.h"

namespace tide::host {
namespace {

// Of one read of pagemap: 16 MiB of memory with pages of 4 KiB.
constexpr int64_t kEntries = 4096;

// An entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst). An own copy is
// anonymous memory, present or swapped; a page that still shows the segment is one of its file.
bool IsOwnCopy(uint64_t entry) {
  constexpr uint64_t kPresent = uint64_t{1} << 63;
  constexpr uint64_t kSwapped = uint64_t{1} << 62;
  constexpr uint64_t kOfFile = uint64_t{1} << 61;
  return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0;
}

// Pages that the program has locked in memory (mlockall) can be dropped since Linux 5.18, by a name
// that older headers don't have.
void Drop(char* address, int64_t bytes) {
  constexpr int kDontNeedLocked = 24;  // MADV_DONTNEED_LOCKED
  const auto length = static_cast<size_t>(bytes);
  if (madvise(address, length, MADV_DONTNEED) == 0) return;
  if (errno == EINVAL && madvise(address, length, kDontNeedLocked) == 0) return;
  internal::ThrowErrno("dropping changed pages of a landing (are they locked in memory?)");
}

}  // namespace

PrivatePages::PrivatePages()
    : pagemap_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)),
      entries_(static_cast<size_t>(kEntries)) {
  if (!pagemap_.valid()) internal::ThrowErrno("opening /proc/self/pagemap");
  TryOut();
}

int64_t PrivatePages::Revert(char* address, int64_t bytes) {
  const int64_t page_bytes = machine::PageBytes();
  const int64_t pages = bytes / page_bytes;
  const int64_t first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)) / page_bytes;
  int64_t dropped = 0;
  for (int64_t done = 0; done < pages; done += kEntries) {
    const int64_t count = std::min(kEntries, pages - done);
    const auto want = static_cast<size_t>(count) * sizeof(uint64_t);
    const auto offset = (first + done) * static_cast<int64_t>(sizeof(uint64_t));
    if (pread(pagemap_.get(), entries_.data(), want, offset) != static_cast<ssize_t>(want)) {
      internal::ThrowErrno("reading /proc/self/pagemap");
    }
    const auto end = entries_.begin() + count;
    auto run = std::find_if(entries_.begin(), end, IsOwnCopy);
    while (run != end) {
      const auto run_end = std::find_if_not(run, end, IsOwnCopy);
      Drop(address + (done + (run - entries_.begin())) * page_bytes, (run_end - run) * page_bytes);
      dropped += run_end - run;
      run = std::find_if(run_end, end, IsOwnCopy);
    }
  }
  return dropped;
}

// Of two pages one is changed, so that seeing none and seeing both fail.
void PrivatePages::TryOut() {
  const int64_t page_bytes = machine::PageBytes();
  const machine::FileDescriptor memory = machine::CreateMemory(2 * page_bytes, "try-out");
  const machine::Mapping shared(memory.get(), 2 * page_bytes, machine::MapKind::kShared);
  const machine::Mapping own(memory.get(), 2 * page_bytes, machine::MapKind::kPrivate);
  // Volatile: to the compiler the mappings are unrelated memory.
  volatile char* theirs = shared.data();
  volatile char* mine = own.data();
  mine[page_bytes] = 1;
  theirs[0] = 2;
  theirs[page_bytes] = 3;
  const bool changed = mine[0] == 2 && mine[page_bytes] == 1;
  if (!changed || Revert(own.data(), own.bytes()) != 1 || mine[page_bytes] != 3) {
    throw Error(ErrorCode::kUnsupported,
                "/proc/self/pagemap does not tell which pages were changed");
  }
}

}  // namespace tide::host
