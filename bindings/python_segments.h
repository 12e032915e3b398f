// Memory of segments that Python gives.
#ifndef TIDE_BINDINGS_PYTHON_SEGMENTS_H_
#define TIDE_BINDINGS_PYTHON_SEGMENTS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>

// Asks allocate(bytes) for (address, context, release): the memory lives until release(context) is
// called, by any thread, with or without the GIL. None leaves the segment to NCCL; MemoryError
// becomes Error(kOutOfMemory).
class PythonSegments {
 public:
  explicit PythonSegments(nanobind::object allocate) : allocate_(std::move(allocate)) {}

  std::shared_ptr<void> Allocate(int64_t bytes) const;

 private:
  nanobind::object allocate_;
};

#endif  // TIDE_BINDINGS_PYTHON_SEGMENTS_H_
