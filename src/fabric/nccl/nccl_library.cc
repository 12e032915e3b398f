#include "fabric/nccl/nccl_library.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "fabric/nccl/nccl_table.h"
#include "tide/error.h"
#include "tide/program.h"

namespace tide::nccl {
namespace {

using Table = std::shared_ptr<const NcclTable>;

bool IsSet(const char* name, const char* to) {
  const char* value = std::getenv(name);
  return value != nullptr && std::strcmp(value, to) == 0;
}

ncclConfig_t MakeConfig(const CommunicatorSettings& settings) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  // No collective of NCCL's runs in these communicators: one channel is the least they can have.
  config.minCTAs = 1;
  config.maxCTAs = 1;
  // Shared resources would serialise lanes, and leave a rail without one-sided operations.
  config.splitShare = 0;
  config.numRmaCtx = settings.contexts;
  if (settings.contexts > 0) {
    config.numRmaSig = settings.signals;
    config.rmaEagerInit = 1;  // the control lane registers no window that would do it
  }
#if NCCL_VERSION_CODE >= 23200
  // NCCL makes multicast objects for collectives of its own, and knows only its own variable.
  if (IsSet("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1") && !IsSet("NCCL_NVLS_ENABLE", "0")) {
    config.nvlsHostMode = ncclNvlsHostModeDisable;
  }
#endif
  return config;
}

class Communicator final : public NcclCommunicator {
 public:
  Communicator(Table table, ncclComm_t comm) : table_(std::move(table)), comm_(comm) {}
  ~Communicator() override { table_->comm_destroy(comm_); }

  CommunicatorProperties Properties() override {
    ncclCommProperties_t properties = {};
    properties.size = sizeof properties;
    properties.magic = NCCL_API_MAGIC;
    properties.version = NCCL_VERSION_CODE;
    Check(table_->comm_query_properties(comm_, &properties), "asking NCCL what it can do");
    return {properties.hostRmaSupport, properties.nLsaTeams, properties.multimemSupport};
  }

  std::unique_ptr<NcclCommunicator> Split(int color, int key,
                                          const CommunicatorSettings& settings) override {
    ncclConfig_t config = MakeConfig(settings);
    ncclComm_t split = nullptr;
    Check(table_->comm_split(comm_, color, key, &split, &config), "splitting a communicator");
    return std::make_unique<Communicator>(table_, split);
  }

  Window Register(void* address, int64_t bytes) override {
    ncclWindow_t window = nullptr;
    Check(table_->comm_window_register(comm_, address, static_cast<size_t>(bytes), &window,
                                       NCCL_WIN_COLL_SYMMETRIC),
          "registering a window");
    // Where windows are not supported NCCL reports success.
    if (window == nullptr) {
      throw Error(ErrorCode::kUnsupported,
                  "NCCL makes no symmetric windows here; expected peer access between all GPUs of "
                  "a node, NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE unset, and between nodes "
                  "InfiniBand or RoCE with GPUDirect RDMA");
    }
    return window;
  }
  void Deregister(Window window) override {
    table_->comm_window_deregister(comm_, static_cast<ncclWindow_t>(window));
  }
  void* PeerPointer(Window window, int peer) override {
    void* pointer = nullptr;
    Check(table_->get_peer_device_pointer(static_cast<ncclWindow_t>(window), 0, peer, &pointer),
          "asking for a peer's memory");
    return pointer;
  }

  void* MulticastPointer(Window window) override {
    void* pointer = nullptr;
    Check(table_->get_lsa_multimem_device_pointer(static_cast<ncclWindow_t>(window), 0, &pointer),
          "asking for a multicast address (NCCL_NVLS_ENABLE=0 does without)");
    return pointer;
  }

  void Send(std::span<const Transfer> transfers, Stream stream) override {
    Check(table_->group_start(), "starting a group");
    ncclResult_t result = ncclSuccess;
    for (const Transfer& transfer : transfers) {
      result = Enqueue(transfer, static_cast<cudaStream_t>(stream));
      if (result != ncclSuccess) break;
    }
    // Also after a failure: an open group belongs to the thread, and would swallow later calls.
    const ncclResult_t ended = table_->group_end();
    Check(result, "a put or a signal");
    Check(ended, "a group of puts");
  }

  // A call for each context: up to 2.30 a launch belongs to one.
  void Wait(std::span<const SignalWait> waits, Stream stream) override {
    for (int context = 0; context < kMaxContexts; ++context) {
      descriptions_.clear();
      for (const SignalWait& wait : waits) {
        if (wait.context != context) continue;
        descriptions_.push_back({wait.count, wait.peer, wait.signal, wait.context});
      }
      if (descriptions_.empty()) continue;
      Check(table_->wait_signal(static_cast<int>(descriptions_.size()), descriptions_.data(), comm_,
                                static_cast<cudaStream_t>(stream)),
            "a wait for signals");
    }
  }

 private:
  ncclResult_t Enqueue(const Transfer& transfer, cudaStream_t stream) {
    if (transfer.bytes == 0) {
      return table_->signal(transfer.peer, transfer.signal, transfer.context, 0, comm_, stream);
    }
    return table_->put_signal(transfer.src, static_cast<size_t>(transfer.bytes), ncclUint8,
                              transfer.peer, static_cast<ncclWindow_t>(transfer.window),
                              static_cast<size_t>(transfer.offset), transfer.signal,
                              transfer.context, 0, comm_, stream);
  }
  void Check(ncclResult_t result, const char* what) const { table_->Check(result, what, comm_); }

  const Table table_;
  const ncclComm_t comm_;
  std::vector<ncclWaitSignalDesc_t> descriptions_;  // kept to reuse the memory
};

// Waits for all work of the GPU that the memory lies on. Where CUDA has ended or failed there is
// nothing to wait for, and nobody to tell.
void SynchroniseOwner(const void* address) {
  cudaPointerAttributes memory{};
  int current = 0;
  if (cudaPointerGetAttributes(&memory, address) == cudaSuccess &&
      cudaGetDevice(&current) == cudaSuccess && cudaSetDevice(memory.device) == cudaSuccess) {
    cudaDeviceSynchronize();
    cudaSetDevice(current);
  }
  cudaGetLastError();  // so that no later check takes the blame
}

class Library final : public NcclLibrary {
 public:
  explicit Library(NcclTable table) : table_(std::make_shared<NcclTable>(std::move(table))) {}

  std::string Description() const override {
    return fmt::format("NCCL {} from {}", NcclVersionText(table_->version), table_->path);
  }
  std::string UniqueId() override {
    ncclUniqueId id;
    table_->Check(table_->get_unique_id(&id), "making an id");
    return {id.internal, sizeof id.internal};
  }
  std::unique_ptr<NcclCommunicator> Init(const std::string& unique_id, int world, int rank,
                                         const CommunicatorSettings& settings) override {
    ncclUniqueId id;
    TIDE_CHECK(unique_id.size() == sizeof id.internal);
    std::memcpy(id.internal, unique_id.data(), sizeof id.internal);
    ncclConfig_t config = MakeConfig(settings);
    ncclComm_t comm = nullptr;
    table_->Check(table_->comm_init_rank_config(&comm, world, id, rank, &config),
                  "connecting the ranks");
    return std::make_unique<Communicator>(table_, comm);
  }
  void* Allocate(int64_t bytes) override {
    void* address = nullptr;
    const ncclResult_t result = table_->mem_alloc(&address, static_cast<size_t>(bytes));
    if (result != ncclSuccess) {
      throw Error(ErrorCode::kOutOfMemory, fmt::format("NCCL could not allocate {} bytes: {}",
                                                       bytes, table_->get_last_error(nullptr)));
    }
    return address;
  }
  // Tensors die before the kernels that read them have run, and NCCL unmaps at once: unlike
  // cudaFree, the driver does not always wait then.
  void Free(void* address) override {
    SynchroniseOwner(address);
    table_->mem_free(address);
  }

 private:
  const std::shared_ptr<NcclTable> table_;
};

}  // namespace

std::shared_ptr<NcclLibrary> LoadNccl(const std::string& path) {
  return std::make_shared<Library>(LoadNcclTable(path));
}

}  // namespace tide::nccl
