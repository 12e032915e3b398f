// The Python module tide._core: thin. It converts arguments, releases the GIL around everything
// that may wait, and turns tide::Error into tide._core.Error.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "calibration.h"
#include "communicator.h"
#include "fabric/host/memory_limit.h"
#include "kernels/host/kernels.h"
#include "layout/format_bytes.h"
#include "nccl.h"
#include "plan.h"
#include "tide/config.h"
#include "tide/dtype.h"
#include "tide/error.h"

namespace nb = nanobind;

namespace {

PyObject* error_type = nullptr;

void TranslateError(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const tide::Error& error) {
    const nb::object instance = nb::handle(error_type)(error.what());
    instance.attr("code") = tide::Name(error.code());
    instance.attr("rank") = error.context().rank;
    instance.attr("peer") = error.context().peer;
    instance.attr("group") = error.context().group;
    instance.attr("operation") = error.context().operation;
    PyErr_SetObject(error_type, instance.ptr());
  }
}

nb::list ConfigRows() {
  nb::list rows;
  for (const tide::ConfigRow& row : tide::ReadConfig().rows) {
    nb::dict item;
    item["name"] = row.name;
    item["type"] = row.type;
    item["default"] = row.default_value;
    item["doc"] = row.doc;
    item["common"] = row.common;
    item["value"] = row.value;
    item["source"] = row.source;
    item["number"] = row.number;
    item["problem"] = row.problem;
    rows.append(item);
  }
  return rows;
}

std::pair<int64_t, std::string> AvailableMemory() {
  auto limit = tide::host::ReadMemoryLimit();
  return {limit.available_bytes, std::move(limit.source)};
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "TIDE's core: collectives that know FSDP2's layout.";
  // Globals of a script outlive the interpreter's shutdown: nothing to tell its user about.
  nb::set_leak_warnings(false);
  error_type = PyErr_NewExceptionWithDoc(
      "tide._core.Error", "A failed call: code, rank, peer (-1 if none), group, operation.",
      PyExc_RuntimeError, nullptr);
  m.attr("Error") = nb::handle(error_type);
  nb::register_exception_translator(&TranslateError);
  m.attr("U8") = static_cast<int>(tide::DType::kU8);
  m.attr("BF16") = static_cast<int>(tide::DType::kBF16);
  m.attr("F16") = static_cast<int>(tide::DType::kF16);
  m.attr("F32") = static_cast<int>(tide::DType::kF32);
  BindNccl(m);
  BindCommunicator(m);
  BindCalibration(m);
  BindPlan(m);
  BindSim(m);
  BindVerify(m);
  m.def("config", &ConfigRows);
  m.def("available_memory", &AvailableMemory,
        "Bytes of memory that this process may still take, and what limits them.");
  m.def("warnings", [] { return tide::ReadConfig().warnings; });
  m.def("format_bytes", &tide::FormatBytes);
  m.def("target", [] { return std::string(tide::kernels::TargetName()); });
}
