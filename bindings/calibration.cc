#include "calibration.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "plan/sizing.h"
#include "tide/communicator.h"
#include "tide/error.h"
#include "tide/machine.h"
#ifdef TIDE_WITH_NCCL
#include "kernels/cuda/device.h"
#endif

namespace nb = nanobind;

namespace {

#ifdef TIDE_WITH_NCCL
// A sum of equal tensors, as the fabric's reduce-scatters and casts run it; the table lies on the
// current GPU.
class TimedSum {
 public:
  TimedSum(int sources, int64_t elems, int src_dtype, int dst_dtype)
      : pointers_(static_cast<size_t>(sources) + 1),
        batch_({Item(sources, elems, src_dtype, dst_dtype)}) {}

  // `addresses`: the output's, then the sources'.
  void Launch(const std::vector<uintptr_t>& addresses, int ctas, uintptr_t stream) {
    if (addresses.size() != pointers_.size()) {
      throw tide::Error(tide::ErrorCode::kInvalidArgument,
                        "a launch needs the output's address and one a source");
    }
    for (size_t i = 0; i < addresses.size(); ++i) {
      pointers_[i] = reinterpret_cast<const void*>(addresses[i]);
    }
    batch_.Launch(pointers_.data(), {.ctas = ctas}, reinterpret_cast<void*>(stream));
  }

 private:
  static tide::kernels::cuda::SumItem Item(int sources, int64_t elems, int src_dtype,
                                           int dst_dtype) {
    tide::kernels::cuda::SumItem item{.elems = elems,
                                      .dst_dtype = static_cast<tide::DType>(dst_dtype),
                                      .src_dtype = static_cast<tide::DType>(src_dtype)};
    for (int i = 1; i <= sources; ++i) item.sources.push_back({.base = i});
    return item;
  }

  std::vector<const void*> pointers_;
  tide::kernels::cuda::SumBatch batch_;
};
#endif

// What CUDA the driver is for, 13000 say; 0 in a build without the kernels.
int CudaOfDriver() {
#ifdef TIDE_WITH_NCCL
  return tide::kernels::cuda::CurrentDevice().driver_version;
#else
  return 0;
#endif
}

std::pair<int, std::string> ChooseSumCtas(const std::string& machine, int nodes, int local_ranks,
                                          int64_t grad_bytes) {
  auto chosen = tide::internal::ChooseSumCtas(tide::MachineFromJson(machine), {nodes, local_ranks},
                                              grad_bytes);
  return {chosen.value, std::move(chosen.why)};
}

}  // namespace

void BindCalibration(nb::module_& m) {
#ifdef TIDE_WITH_NCCL
  nb::class_<TimedSum>(m, "TimedSum")
      .def(nb::init<int, int64_t, int, int>(), nb::arg("sources"), nb::arg("elems"),
           nb::arg("src_dtype"), nb::arg("dst_dtype"))
      .def("launch", &TimedSum::Launch, nb::arg("addresses"), nb::arg("ctas"), nb::arg("stream"));
#endif
  m.attr("SUM_VERSION") = tide::kernels::cuda::kSumVersion;
  m.def("cuda_of_driver", &CudaOfDriver);
  m.def("default_sum_ctas", &tide::DefaultSumCtas, nb::arg("multiprocessors"));
  m.def("choose_sum_ctas", &ChooseSumCtas, nb::arg("machine"), nb::arg("nodes"),
        nb::arg("local_ranks"), nb::arg("grad_bytes"),
        "The CTAs of a sum on a machine in JSON that was calibrated, and why.");
}
