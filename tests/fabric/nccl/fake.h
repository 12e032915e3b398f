// CUDA and NCCL on host memory, over the streams of a FakeWorld.
//
// A sum of nothing is a pause: what follows it in its stream is held back until nothing else can
// move (FakeWorld::Resume).
#ifndef TIDE_TESTS_FABRIC_NCCL_FAKE_H_
#define TIDE_TESTS_FABRIC_NCCL_FAKE_H_

#include "fabric/nccl/fake_world.h"
#include "fabric/nccl/nccl_fabric.h"

namespace tide::testing {

// The parts of one rank.
nccl::MakeParts FakeParts(FakeWorld& world, int rank);

// Calls `work` when the stream comes to it, as a kernel of the caller's would run.
void RunInStream(FakeWorld& world, nccl::Stream stream, FakeWorld::Work work);

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_FAKE_H_
