// Both collectives on GPUs, ranks as processes, several on one GPU if there are fewer than ranks.
//
// Needs a GPU and NCCL 2.31.2 or newer in TIDE_NCCL_LIBRARY; skips itself without.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/nccl/cuda_device.h"
#include "fabric/nccl/forked_ranks.h"
#include "fabric/nccl/make_fabric.h"
#include "fabric/nccl/stream_search.h"
#include "fabric/nccl/test_bed.h"
#include "fabric/nccl/watchdog.h"
#include "kernels/cuda/device.h"

namespace tide {
namespace {

using testing::RandomCase;

constexpr int kLayouts = 3;

class GpuBed final : public testing::TestBed {
 public:
  char* Allocate(int64_t bytes) override {
    memory_.push_back(
        std::make_unique<kernels::cuda::DeviceMemory>(static_cast<size_t>(bytes) + 1));
    return reinterpret_cast<char*>(memory_.back()->data());
  }
  void Upload(void* device, const std::vector<char>& host) override {
    if (cudaMemcpyAsync(device, host.data(), host.size(), cudaMemcpyHostToDevice, copies()) !=
            cudaSuccess ||
        cudaStreamSynchronize(copies()) != cudaSuccess) {
      throw std::runtime_error("upload failed");
    }
  }
  std::vector<char> Download(const void* device, int64_t bytes) override {
    std::vector<char> host(static_cast<size_t>(bytes));
    if (cudaMemcpyAsync(host.data(), device, host.size(), cudaMemcpyDeviceToHost, copies()) !=
            cudaSuccess ||
        cudaStreamSynchronize(copies()) != cudaSuccess) {
      throw std::runtime_error("download failed");
    }
    return host;
  }
  void* stream() override { return stream_.get(); }
  void Synchronise() override { kernels::cuda::Synchronise(stream_.get()); }

 private:
  cudaStream_t copies() { return static_cast<cudaStream_t>(copies_.get()); }

  kernels::cuda::OwnedStream stream_;
  kernels::cuda::OwnedStream copies_;
  std::vector<std::unique_ptr<kernels::cuda::DeviceMemory>> memory_;
};

// Asked in a child: this process must not touch CUDA.
int CountGpus() {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    _exit(cudaGetDeviceCount(&count) == cudaSuccess ? count : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

// Makes it the one that this process allocates on; returns it.
int ChooseGpu(int index) {
  if (const cudaError_t status = cudaSetDevice(index); status != cudaSuccess) {
    throw std::runtime_error("choosing GPU " + std::to_string(index) + ": " +
                             cudaGetErrorString(status));
  }
  return index;
}

void CheckRank(Bootstrap& bootstrap, const Topology& topology, int gpus, unsigned seed) {
  const auto choice = testing::CoveringRow(static_cast<int>(seed) % testing::kCoveringRows);
  SCOPED_TRACE(::testing::Message()
               << topology.nodes << " x " << topology.local_ranks << ", seed " << seed
               << ", n_part " << choice.passes << ", k " << choice.round_width << ", "
               << Name(choice.mode) << ", " << Name(choice.placement));
  const RandomCase made = testing::MakeRandomCase(seed, 20);
  CommunicatorOptions options = testing::MakeOptions(topology, choice, seed);
  options.device = ChooseGpu(bootstrap.rank() % gpus);
  options.nccl_library = std::getenv("TIDE_NCCL_LIBRARY");
  const GroupLayout layout("g", made.shapes, topology.Ranks());
  const testing::ReductionReference reference(layout, topology, options.reduce_scatter,
                                              made.grad_dtypes);
  const testing::LayoutCase layout_case{made, reference,
                                        seed % 2 == 0 ? DType::kBF16 : DType::kF32};
  GpuBed bed;
  options.compute_streams = {bed.stream()};
  Communicator comm(nccl::MakeNcclFabric(bootstrap, options), options);
  testing::RankCheck(comm, bed, layout_case).Run();
}

// Why nothing can run here; else sets the environment of the ranks.
std::string Prepare() {
  if (std::getenv("TIDE_NCCL_LIBRARY") == nullptr) {
    return "set TIDE_NCCL_LIBRARY to a libnccl.so.2 of 2.31.2 or newer";
  }
  if (CountGpus() == 0) return "no GPU";
  // Several ranks on one GPU; multicast is not possible then.
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  return "";
}

class GpuCollectives : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(GpuCollectives, ThreeLayouts) {
  const std::string missing = Prepare();
  if (!missing.empty()) GTEST_SKIP() << missing;
  const int gpus = CountGpus();
  const Topology topology{GetParam().first, GetParam().second};
  testing::RunForkedRanks(topology.Ranks(), std::chrono::seconds(180), [&](Bootstrap& bootstrap) {
    for (int i = 0; i < kLayouts && !HasFailure(); ++i) {
      CheckRank(bootstrap, topology, gpus,
                static_cast<unsigned>(1000 * topology.nodes + 100 * topology.local_ranks + i));
    }
  });
}

// Two ranks that gather once together; then `then` differs by rank.
void CheckFailure(const std::function<void(Bootstrap&, Communicator&, const AllGatherCall&)>& then,
                  const std::vector<int>& statuses) {
  const int gpus = CountGpus();
  const auto body = [&](Bootstrap& bootstrap) {
    CommunicatorOptions options;
    options.device = ChooseGpu(bootstrap.rank() % gpus);
    options.nccl_library = std::getenv("TIDE_NCCL_LIBRARY");
    options.timeout = std::chrono::minutes(10);  // far longer than the ranks have
    GpuBed bed;
    Communicator comm(nccl::MakeNcclFabric(bootstrap, options), options);
    EXPECT_EQ(comm.unwatched_reason(), "");
    const int group = comm.RegisterGroup("layers.3", {{"w", 4, 4, DType::kF32}});
    const SegmentView landing = comm.AddSegment(2 * comm.layout(group).landing_bytes(), "landing");
    const void* shard = bed.Copy(std::vector<char>(32));
    const AllGatherCall call{group, {shard}, {DType::kF32}, {landing.id, 0}, bed.stream()};
    comm.AllGather(call);
    bed.Synchronise();
    bootstrap.AllGather("");
    then(bootstrap, comm, call);
    bed.Synchronise();
    while (true) pause();  // the watchdog ends it
  };
  testing::RunForkedRanks(2, std::chrono::seconds(90), body, statuses);
}

TEST(GpuFailure, AKilledRankEndsTheOther) {
  const std::string missing = Prepare();
  if (!missing.empty()) GTEST_SKIP() << missing;
  const auto then = [](Bootstrap& bootstrap, Communicator& comm, const AllGatherCall& call) {
    if (bootstrap.rank() == 1) kill(getpid(), SIGKILL);
    comm.AllGather(call);
  };
  CheckFailure(then, {nccl::kWatchdogExitStatus, -SIGKILL});
}

TEST(GpuFailure, AnotherCallEndsBoth) {
  const std::string missing = Prepare();
  if (!missing.empty()) GTEST_SKIP() << missing;
  const auto then = [](Bootstrap& bootstrap, Communicator& comm, AllGatherCall call) {
    if (bootstrap.rank() == 1) call.landing.offset = comm.layout(call.group).landing_bytes();
    comm.AllGather(call);
  };
  CheckFailure(then, {nccl::kWatchdogExitStatus, nccl::kWatchdogExitStatus});
}

// What is found holds up nothing. How many queues there are to find is the driver's choice.
TEST(GpuStreams, NoneOfThoseFoundHoldsUpCompute) {
  const std::string missing = Prepare();
  if (!missing.empty()) GTEST_SKIP() << missing;
  const auto body = [](Bootstrap& /*bootstrap*/) {
    constexpr int kCount = 8;
    const auto device = nccl::MakeCudaDevice(/*index=*/0, /*sum_ctas=*/0);
    const auto wait = [&](nccl::EventHandle event) {
      while (!device->Finished(event)) std::this_thread::yield();
    };
    const kernels::cuda::OwnedStream compute;
    const auto found = nccl::FindStreams(*device, {compute.get()}, kCount, wait);
    ASSERT_EQ(found.streams.size(), size_t{kCount});
    std::printf("%s connections: %d of %d streams share a queue with compute\n",
                std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), found.aliases, kCount);
    const nccl::MemoryOp closed{true, device->HostWords(), uint64_t{1} << 40};
    const nccl::EventHandle done = device->CreateEvent();
    if (found.aliases == 0) {
      for (nccl::Stream stream : found.streams) device->MemoryOps({&closed, 1}, stream);
      device->Record(done, compute.get());
      wait(done);  // or the time of this process is over
    }
    device->SetHostWord(closed.address, closed.value);
    for (nccl::Stream stream : found.streams) {
      device->Record(done, stream);
      wait(done);
    }
  };
  for (const char* connections : {"2", "8", "32"}) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1);
    testing::RunForkedRanks(1, std::chrono::seconds(60), body);
  }
}

INSTANTIATE_TEST_SUITE_P(UpToEightRanks, GpuCollectives,
                         ::testing::ValuesIn(testing::TopologiesUpTo(8)), testing::TopologyName);

}  // namespace
}  // namespace tide
