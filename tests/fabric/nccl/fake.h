// CUDA and NCCL on host memory, over the streams of a FakeWorld.
//
// A write to a multicast address is a line of its own at each rank; a sum of one reads the ranks in
// lines, too, and adds in their order, which need not be the wave's.
//
// A sum of nothing is a pause: what follows it in its stream is held back until nothing else can
// move (FakeWorld::Resume).
#ifndef TIDE_TESTS_FABRIC_NCCL_FAKE_H_
#define TIDE_TESTS_FABRIC_NCCL_FAKE_H_

#include <memory>

#include "fabric/nccl/fake_world.h"
#include "fabric/nccl/nccl_fabric.h"

namespace tide::testing {

// The parts of one rank, which keep the world: an abandoned fabric goes on asking.
nccl::MakeParts FakeParts(const std::shared_ptr<FakeWorld>& world, int rank);

// Gives every rank multicast in nodes of so many ranks, and unsets the variables that forbid it.
void AllowMulticast(FakeWorld& world, int local_ranks);

// While it lives, what this thread allocates is no leak: an abandoned fabric stays for good.
class ExpectAbandoned {
 public:
  ExpectAbandoned();
  ~ExpectAbandoned();
  ExpectAbandoned(const ExpectAbandoned&) = delete;
  ExpectAbandoned& operator=(const ExpectAbandoned&) = delete;
};

// Calls `work` when the stream comes to it, as a kernel of the caller's would run.
void RunInStream(FakeWorld& world, nccl::Stream stream, FakeWorld::Work work);

// What follows in the stream is held back until nothing else can move.
void PauseStream(FakeWorld& world, nccl::Stream stream);

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_FAKE_H_
