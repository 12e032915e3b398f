// CUDA's error codes as tide::Error.
#ifndef TIDE_KERNELS_CUDA_CUDA_ERROR_CUH_
#define TIDE_KERNELS_CUDA_CUDA_ERROR_CUH_

#include <cuda_runtime_api.h>

#include <string>

#include "tide/error.h"

namespace tide::kernels::cuda::internal {

// "launching a sum of 7 tiles: invalid argument (cudaErrorInvalidValue)". The error is taken off
// CUDA's record, so that the caller's next check does not see it again.
inline void CheckCuda(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const ErrorCode code = status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory
                         : status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver ||
                                 status == cudaErrorNoKernelImageForDevice
                             ? ErrorCode::kUnsupported
                             : ErrorCode::kInternal;
  throw Error(code,
              what + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

inline int Attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  CheckCuda(cudaGetDevice(&device), "asking for the current device");
  CheckCuda(cudaDeviceGetAttribute(&value, attribute, device), "asking for a device attribute");
  return value;
}

}  // namespace tide::kernels::cuda::internal

#endif  // TIDE_KERNELS_CUDA_CUDA_ERROR_CUH_
