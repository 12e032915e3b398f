#include "fabric/nccl/fake.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include <cstdlib>
#include <memory>
#include <utility>

#include "fabric/nccl/fake_parts.h"

namespace tide::testing {

void RunInStream(FakeWorld& world, nccl::Stream stream, FakeWorld::Work work) {
  world.Append(QueueOf(stream), {{}, {}, std::move(work)});
}

void PauseStream(FakeWorld& world, nccl::Stream stream) {
  world.Append(QueueOf(stream), {{}, {}, {}, /*pause=*/true});
}

void AllowMulticast(FakeWorld& world, int local_ranks) {
  for (const char* name : {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"}) unsetenv(name);
  for (int rank = 0; rank < world.ranks(); ++rank) {
    world.traits(rank).lsa_teams = world.ranks() / local_ranks;
    world.traits(rank).multimem = true;
  }
}

#ifdef __SANITIZE_ADDRESS__
ExpectAbandoned::ExpectAbandoned() { __lsan_disable(); }
ExpectAbandoned::~ExpectAbandoned() { __lsan_enable(); }
#else
ExpectAbandoned::ExpectAbandoned() = default;
ExpectAbandoned::~ExpectAbandoned() = default;
#endif

nccl::MakeParts FakeParts(const std::shared_ptr<FakeWorld>& world, int rank) {
  return [world, rank] {
    return nccl::Parts{MakeFakeDevice(world, rank), MakeFakeLibrary(*world, rank)};
  };
}

}  // namespace tide::testing
