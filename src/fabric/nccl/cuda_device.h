// The GPU of this rank through CUDA's runtime, linked statically, and the driver, found at run
// time.
#ifndef TIDE_FABRIC_NCCL_CUDA_DEVICE_H_
#define TIDE_FABRIC_NCCL_CUDA_DEVICE_H_

#include <memory>

#include "fabric/nccl/device.h"

namespace tide::nccl {

// `index` as CUDA counts, -1 for the current one; `sum_ctas` thread blocks a sum, 0 for a quarter
// of the multiprocessors. Throws Error(kUnsupported) with what the device or its driver lacks.
std::unique_ptr<Device> MakeCudaDevice(int index, int sum_ctas);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_CUDA_DEVICE_H_
