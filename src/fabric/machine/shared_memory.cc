#include "fabric/machine/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tide/error.h"

namespace tide::machine {

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = other.Release();
  }
  return *this;
}

int FileDescriptor::Release() { return std::exchange(fd_, -1); }

void FileDescriptor::Reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

int64_t PageBytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

Mapping::Mapping(int fd, int64_t bytes, MapKind kind) : bytes_(bytes) {
  // Not MAP_POPULATE for a private mapping: it writes, which would make every page an own copy.
  // Own copies are few: no memory is set aside for them (MAP_NORESERVE).
  const int flags =
      kind == MapKind::kShared ? MAP_SHARED | MAP_POPULATE : MAP_PRIVATE | MAP_NORESERVE;
  const auto length = static_cast<size_t>(bytes);
  void* data = mmap(nullptr, length, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) internal::ThrowErrno(fmt::format("mapping {} shared bytes", bytes));
  data_ = static_cast<char*>(data);
  // Only saves faults at the first read; kernels before 5.14 don't know it.
  if (kind == MapKind::kPrivate) madvise(data, length, MADV_POPULATE_READ);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

FileDescriptor CreateMemory(int64_t bytes, const std::string& label) {
  FileDescriptor fd(memfd_create(("tide:" + label).c_str(), MFD_CLOEXEC));
  if (!fd.valid()) internal::ThrowErrno("creating shared memory for " + label);
  if (ftruncate(fd.get(), bytes) != 0 || fallocate(fd.get(), 0, 0, bytes) != 0) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("{}: the kernel can't reserve {} bytes of shared memory ({})", label,
                            bytes, std::strerror(errno)));
  }
  return fd;
}

}  // namespace tide::machine
