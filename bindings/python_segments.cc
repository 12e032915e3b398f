#include "python_segments.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "tide/error.h"

namespace nb = nanobind;

std::shared_ptr<void> PythonSegments::Allocate(int64_t bytes) const {
  const nb::gil_scoped_acquire gil;
  try {
    if (allocate_.is_none()) return nullptr;
    const nb::object found = allocate_(bytes);
    if (found.is_none()) return nullptr;
    const auto [address, context, release] =
        nb::cast<std::tuple<uintptr_t, uintptr_t, uintptr_t>>(found);
    const auto free = reinterpret_cast<void (*)(void*)>(release);
    auto* lease = reinterpret_cast<void*>(context);
    return {reinterpret_cast<void*>(address), [free, lease](void* /*address*/) { free(lease); }};
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_MemoryError)) throw;
    throw tide::Error(tide::ErrorCode::kOutOfMemory, nb::cast<std::string>(nb::str(error.value())));
  }
}

void PythonSegments::FreeCached() const {
  const nb::gil_scoped_acquire gil;
  if (!free_cached_.is_none()) free_cached_();
}
