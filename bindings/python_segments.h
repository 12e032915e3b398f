// Memory of segments that Python gives, and what else it knows of the GPU's memory.
#ifndef TIDE_BINDINGS_PYTHON_SEGMENTS_H_
#define TIDE_BINDINGS_PYTHON_SEGMENTS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>

// Asks allocate(bytes) for (address, context, release): the memory lives until release(context) is
// called, by any thread, with or without the GIL. None leaves the segment to NCCL; MemoryError
// becomes Error(kOutOfMemory). free_cached() gives back what Python's allocator keeps for later;
// None if it keeps nothing.
class PythonSegments {
 public:
  PythonSegments(nanobind::object allocate, nanobind::object free_cached)
      : allocate_(std::move(allocate)), free_cached_(std::move(free_cached)) {}

  std::shared_ptr<void> Allocate(int64_t bytes) const;
  void FreeCached() const;

 private:
  nanobind::object allocate_;
  nanobind::object free_cached_;
};

#endif  // TIDE_BINDINGS_PYTHON_SEGMENTS_H_
