// The part of the module that knows whether this build has the nccl fabric.
#ifndef TIDE_BINDINGS_NCCL_H_
#define TIDE_BINDINGS_NCCL_H_

#include <nanobind/nanobind.h>

#include <memory>

#include "tide/bootstrap.h"
#include "tide/communicator.h"

// On the fabric that the options name. The bootstrap outlives the communicator.
std::unique_ptr<tide::Communicator> MakeCommunicator(tide::Bootstrap& bootstrap,
                                                     const tide::CommunicatorOptions& options);

void BindNccl(nanobind::module_& m);

#endif  // TIDE_BINDINGS_NCCL_H_
