#include "fabric/nccl/make_fabric.h"

#include "fabric/nccl/cuda_device.h"
#include "fabric/nccl/nccl_fabric.h"
#include "fabric/nccl/nccl_library.h"

namespace tide::nccl {

std::unique_ptr<Fabric> MakeNcclFabric(Bootstrap& bootstrap, const CommunicatorOptions& options) {
  return std::make_unique<NcclFabric>(bootstrap, options, [&] {
    return Parts{MakeCudaDevice(options.device, options.sum_ctas), LoadNccl(options.nccl_library)};
  });
}

}  // namespace tide::nccl
