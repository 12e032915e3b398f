// The two halves of a rank's parts, and what they share.
#ifndef TIDE_TESTS_FABRIC_NCCL_FAKE_PARTS_H_
#define TIDE_TESTS_FABRIC_NCCL_FAKE_PARTS_H_

#include <memory>

#include "fabric/nccl/fake_world.h"
#include "fabric/nccl/nccl_fabric.h"

namespace tide::testing {

inline FakeWorld::Queue* QueueOf(nccl::Stream stream) {
  return static_cast<FakeWorld::Queue*>(stream);
}

// CUDA: streams, copies, memory operations and kernels.
std::unique_ptr<nccl::Device> MakeFakeDevice(std::shared_ptr<FakeWorld> world, int rank);

// NCCL: memory, communicators, windows and transfers. The world must outlive it.
std::shared_ptr<nccl::NcclLibrary> MakeFakeLibrary(FakeWorld& world, int rank);

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_FAKE_PARTS_H_
