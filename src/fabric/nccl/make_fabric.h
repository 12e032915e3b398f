// The nccl fabric on the GPU of this process.
#ifndef TIDE_FABRIC_NCCL_MAKE_FABRIC_H_
#define TIDE_FABRIC_NCCL_MAKE_FABRIC_H_

#include <memory>

#include "fabric/fabric.h"
#include "tide/bootstrap.h"
#include "tide/communicator.h"

namespace tide::nccl {

// Collective; see NcclFabric.
std::unique_ptr<Fabric> MakeNcclFabric(Bootstrap& bootstrap, const CommunicatorOptions& options);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_MAKE_FABRIC_H_
