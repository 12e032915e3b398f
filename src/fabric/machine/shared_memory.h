// One rank's shared memory: an anonymous memfd, mapped. It has no name, so nothing is left behind
// when the last process that holds it is gone, however it ended.
#ifndef TIDE_FABRIC_MACHINE_SHARED_MEMORY_H_
#define TIDE_FABRIC_MACHINE_SHARED_MEMORY_H_

#include <cstdint>
#include <string>

namespace tide::machine {

// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.Release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();
  void Reset();

 private:
  int fd_ = -1;
};

// Bytes of one page of this machine. Mappings are whole pages.
int64_t PageBytes();

enum class MapKind : uint8_t {
  kShared,   // what is written is seen by everyone who maps the memory
  kPrivate,  // copy on write: a page shows the memory until this process writes to it
};

// Owns a mapping of a whole memfd.
class Mapping {
 public:
  Mapping() = default;
  // Maps `bytes` of `fd` and makes the pages present. Throws Error on failure.
  Mapping(int fd, int64_t bytes, MapKind kind);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Makes a memfd of `bytes`, all pages reserved, so that a later write never meets an empty machine.
// Throws Error(kOutOfMemory) if the kernel can't reserve them.
FileDescriptor CreateMemory(int64_t bytes, const std::string& label);

}  // namespace tide::machine

#endif  // TIDE_FABRIC_MACHINE_SHARED_MEMORY_H_
