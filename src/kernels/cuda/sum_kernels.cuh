// The kernels as launches see them; a sum has one for each path. A kernel takes one
// LaunchParams<kFewBases> or, `many`, LaunchParams<kManyBases>.
#ifndef TIDE_KERNELS_CUDA_SUM_KERNELS_CUH_
#define TIDE_KERNELS_CUDA_SUM_KERNELS_CUH_

#include <cstdint>

#include "kernels/cuda/table.h"

namespace tide::kernels::cuda::internal {

struct Kernel {
  const void* function = nullptr;
  int threads = 0;
};

Kernel PlainKernel(bool many);
Kernel MulticastKernel(bool many);
Kernel BulkKernel(bool many);
Kernel ZeroKernel(bool many);
Kernel RefreshKernel(bool many);

// The ring of the bulk path within `limit_bytes` of shared memory; no slots if it is too little.
struct BulkMemory {
  uint32_t slots = 0;
  uint32_t bytes = 0;
};
BulkMemory FitBulkMemory(int64_t limit_bytes);

}  // namespace tide::kernels::cuda::internal

#endif  // TIDE_KERNELS_CUDA_SUM_KERNELS_CUH_
