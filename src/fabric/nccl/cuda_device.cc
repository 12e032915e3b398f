#include "fabric/nccl/cuda_device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/cuda/cuda_error.cuh"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide::nccl {
namespace {

using kernels::cuda::RefreshBatch;
using kernels::cuda::SumBatch;
using kernels::cuda::SumCall;
using kernels::cuda::SumItem;
using kernels::cuda::SumPath;
using kernels::cuda::ZeroBatch;
using kernels::cuda::ZeroItem;
using kernels::cuda::internal::CheckCuda;

// cuStreamBatchMemOp as of 11.7: no need to switch memory operations on in the driver. NCCL's
// one-sided operations need a driver of 12.5.
constexpr unsigned kDriverVersion = 12000;

cudaStream_t ToCuda(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t EventToCuda(EventHandle event) { return static_cast<cudaEvent_t>(event); }

// The driver's functions have no stub to link with where no driver is.
struct DriverApi {
  decltype(&cuStreamBatchMemOp) stream_batch_mem_op = nullptr;
  decltype(&cuDeviceGetAttribute) device_get_attribute = nullptr;
  decltype(&cuGetErrorName) get_error_name = nullptr;
};

template <typename Function>
void FindEntry(const char* name, Function* function) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  CheckCuda(
      cudaGetDriverEntryPointByVersion(name, &entry, kDriverVersion, cudaEnableDefault, &found),
      name);
#else
  CheckCuda(cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found), name);
#endif
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("the CUDA driver has no {}; expected a driver for CUDA 12.5 or newer", name));
  }
  *function = reinterpret_cast<Function>(entry);
}

class SumKernel final : public Kernel {
 public:
  SumKernel(const std::vector<SumItem>& items, int ctas, SumPath path = SumPath::kAuto)
      : batch_(items, path), ctas_(ctas) {}
  void Launch(const void* const* bases, const SumCall& call, Stream stream) override {
    SumCall budgeted = call;
    budgeted.ctas = ctas_;
    batch_.Launch(bases, budgeted, stream);
  }

 private:
  SumBatch batch_;
  const int ctas_;
};

class RefreshKernel final : public Kernel {
 public:
  RefreshKernel(const std::vector<SumItem>& items, int ctas) : batch_(items), ctas_(ctas) {}
  void Launch(const void* const* bases, const SumCall& /*call*/, Stream stream) override {
    batch_.Launch(bases, ctas_, stream);
  }

 private:
  RefreshBatch batch_;
  const int ctas_;
};

class ZeroKernel final : public Kernel {
 public:
  ZeroKernel(const std::vector<ZeroItem>& items, int ctas) : batch_(items), ctas_(ctas) {}
  void Launch(const void* const* bases, const SumCall& /*call*/, Stream stream) override {
    batch_.Launch(const_cast<void* const*>(bases), ctas_, stream);
  }

 private:
  ZeroBatch batch_;
  const int ctas_;
};

struct StreamDeleter {
  void operator()(Stream stream) const { cudaStreamDestroy(ToCuda(stream)); }
};
using OwnedStream = std::unique_ptr<void, StreamDeleter>;

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, int sum_ctas) : index_(index), sum_ctas_(sum_ctas) {
    if (index_ < 0) CheckCuda(cudaGetDevice(&index_), "asking for the current GPU");
    MakeCurrent();
    // Creates the context, which the driver's functions need.
    CheckCuda(cudaFree(nullptr), "starting CUDA");
    FindEntry("cuStreamBatchMemOp", &driver_.stream_batch_mem_op);
    FindEntry("cuDeviceGetAttribute", &driver_.device_get_attribute);
    FindEntry("cuGetErrorName", &driver_.get_error_name);
    int words = 0;
    CheckDriver(driver_.device_get_attribute(
                    &words, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, index_),
                "asking for memory operations");
    if (words == 0) {
      throw Error(ErrorCode::kUnsupported,
                  "the GPU or its driver has no 64-bit stream memory operations");
    }
    const int major = Attribute(cudaDevAttrComputeCapabilityMajor);
    if (major < 8) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("expected a GPU of compute capability 8.0 or newer, got {}.{}", major,
                              Attribute(cudaDevAttrComputeCapabilityMinor)));
    }
    int lowest = 0;
    CheckCuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest_), "asking for priorities");
    multiprocessors_ = Attribute(cudaDevAttrMultiProcessorCount);
    if (sum_ctas_ == 0) sum_ctas_ = DefaultSumCtas(multiprocessors_);
  }

  ~CudaDevice() override {
    if (host_words_ != nullptr) cudaFreeHost(host_words_);
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  void MakeCurrent() override { CheckCuda(cudaSetDevice(index_), "choosing the GPU"); }
  // A capture in CUDA's default mode forbids other threads to query an event, and ends as invalid
  // if one does, unless that thread minds its own captures only.
  void MakeCurrentInBackground() override {
    MakeCurrent();
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    CheckCuda(cudaThreadExchangeStreamCaptureMode(&mode), "setting a thread's capture mode");
  }

  Stream CreateStream() override {
    cudaStream_t stream = nullptr;
    CheckCuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest_),
              "making a stream");
    return stream;
  }
  void DestroyStream(Stream stream) override { cudaStreamDestroy(ToCuda(stream)); }
  EventHandle CreateEvent() override {
    cudaEvent_t event = nullptr;
    CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
  }
  void DestroyEvent(EventHandle event) override { cudaEventDestroy(EventToCuda(event)); }
  void Record(EventHandle event, Stream stream) override {
    CheckCuda(cudaEventRecord(EventToCuda(event), ToCuda(stream)), "recording an event");
  }
  void Await(Stream stream, EventHandle event) override {
    CheckCuda(cudaStreamWaitEvent(ToCuda(stream), EventToCuda(event), 0), "awaiting an event");
  }
  bool Finished(EventHandle event) override {
    const cudaError_t status = cudaEventQuery(EventToCuda(event));
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // takes it off CUDA's record
      return false;
    }
    // The process is at its end, behind the driver's: nothing is left to watch.
    if (status == cudaErrorCudartUnloading) return true;
    CheckCuda(status, "a call on the GPU");
    return true;
  }

  void Copy(std::span<const CopyArgs> batch, Stream stream) override;
  void CopyPitched(std::span<const PitchedArgs> batch, Stream stream) override;
  void MemoryOps(std::span<const MemoryOp> batch, Stream stream) override;

  std::unique_ptr<Kernel> MakeSum(const std::vector<SumItem>& items) override {
    return std::make_unique<SumKernel>(items, sum_ctas_);
  }
  std::unique_ptr<Kernel> MakeCast(const std::vector<SumItem>& items) override {
    return std::make_unique<SumKernel>(items, multiprocessors_);
  }
  std::unique_ptr<Kernel> MakeRefresh(const std::vector<SumItem>& items) override {
    return std::make_unique<RefreshKernel>(items,
                                           RefreshBatch::kCtasAMultiprocessor * multiprocessors_);
  }
  std::unique_ptr<Kernel> MakeMulticastSum(const std::vector<SumItem>& items) override {
    return std::make_unique<SumKernel>(items, sum_ctas_, SumPath::kMulticast);
  }
  std::unique_ptr<Kernel> MakeZero(const std::vector<ZeroItem>& items) override {
    return std::make_unique<ZeroKernel>(items, multiprocessors_);
  }

  uint64_t* HostWords() override {
    if (host_words_ == nullptr) {
      void* words = nullptr;
      CheckCuda(cudaHostAlloc(&words, 2 * sizeof(uint64_t), cudaHostAllocDefault),
                "allocating host memory");
      std::memset(words, 0, 2 * sizeof(uint64_t));
      host_words_ = static_cast<uint64_t*>(words);
    }
    return host_words_;
  }
  void SetHostWord(uint64_t* word, uint64_t value) override {
    std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
  }

  void Clear(void* address, int64_t bytes) override {
    const OwnedStream stream = MakeStream();
    CheckCuda(cudaMemsetAsync(address, 0, static_cast<size_t>(bytes), ToCuda(stream.get())),
              "clearing a segment");
    CheckCuda(cudaStreamSynchronize(ToCuda(stream.get())), "clearing a segment");
  }
  void Read(void* host, const void* address, int64_t bytes) override {
    const OwnedStream stream = MakeStream();
    CheckCuda(cudaMemcpyAsync(host, address, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                              ToCuda(stream.get())),
              "reading counters");
    CheckCuda(cudaStreamSynchronize(ToCuda(stream.get())), "reading counters");
  }

 private:
  OwnedStream MakeStream() { return OwnedStream(CreateStream()); }
  int Attribute(cudaDeviceAttr attribute) const {
    int value = 0;
    CheckCuda(cudaDeviceGetAttribute(&value, attribute, index_), "asking for an attribute");
    return value;
  }
  void CheckDriver(CUresult status, const char* what) const {
    if (status == CUDA_SUCCESS) return;
    const char* name = nullptr;
    driver_.get_error_name(status, &name);
    throw Error(ErrorCode::kInternal, fmt::format("{}: {}", what, name != nullptr ? name : "?"));
  }

  int index_;
  int highest_ = 0;  // priority
  int sum_ctas_;
  int multiprocessors_ = 1;
  DriverApi driver_;
  uint64_t* host_words_ = nullptr;
  // Kept to reuse the memory.
  std::vector<void*> dsts_;
  std::vector<const void*> srcs_;
  std::vector<size_t> sizes_;
#if CUDART_VERSION >= 13000
  std::vector<cudaMemcpy3DBatchOp> pitched_;
#endif
  std::vector<CUstreamBatchMemOpParams> params_;
};

void CudaDevice::Copy(std::span<const CopyArgs> batch, Stream stream) {
#if CUDART_VERSION >= 13000
  dsts_.clear();
  srcs_.clear();
  sizes_.clear();
  for (const CopyArgs& copy : batch) {
    dsts_.push_back(copy.dst);
    srcs_.push_back(copy.src);
    sizes_.push_back(static_cast<size_t>(copy.bytes));
  }
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  CheckCuda(cudaMemcpyBatchAsync(dsts_.data(), srcs_.data(), sizes_.data(), batch.size(),
                                 &attributes, &first, 1, ToCuda(stream)),
            "a batch of copies");
#else
  // Before 13.0 the batch has another signature, or does not exist.
  for (const CopyArgs& copy : batch) {
    CheckCuda(cudaMemcpyAsync(copy.dst, copy.src, static_cast<size_t>(copy.bytes),
                              cudaMemcpyDefault, ToCuda(stream)),
              "a copy");
  }
#endif
}

void CudaDevice::CopyPitched(std::span<const PitchedArgs> batch, Stream stream) {
#if CUDART_VERSION >= 13000
  pitched_.clear();
  for (const PitchedArgs& copy : batch) {
    cudaMemcpy3DBatchOp& op = pitched_.emplace_back();
    const auto rows = static_cast<size_t>(copy.rows);
    op.src.type = cudaMemcpyOperandTypePointer;
    op.src.op.ptr.ptr = const_cast<void*>(copy.src);
    op.src.op.ptr.rowLength = static_cast<size_t>(copy.src_pitch);
    op.src.op.ptr.layerHeight = rows;
    op.dst.type = cudaMemcpyOperandTypePointer;
    op.dst.op.ptr.ptr = copy.dst;
    op.dst.op.ptr.rowLength = static_cast<size_t>(copy.dst_pitch);
    op.dst.op.ptr.layerHeight = rows;
    op.extent = {static_cast<size_t>(copy.row_bytes), rows, 1};
    op.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    op.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  }
  CheckCuda(cudaMemcpy3DBatchAsync(pitched_.size(), pitched_.data(), 0, ToCuda(stream)),
            "a batch of pitched copies");
#else
  for (const PitchedArgs& copy : batch) {
    CheckCuda(
        cudaMemcpy2DAsync(copy.dst, static_cast<size_t>(copy.dst_pitch), copy.src,
                          static_cast<size_t>(copy.src_pitch), static_cast<size_t>(copy.row_bytes),
                          static_cast<size_t>(copy.rows), cudaMemcpyDefault, ToCuda(stream)),
        "a pitched copy");
  }
#endif
}

void CudaDevice::MemoryOps(std::span<const MemoryOp> batch, Stream stream) {
  params_.clear();
  for (const MemoryOp& op : batch) {
    CUstreamBatchMemOpParams& params = params_.emplace_back();
    const auto address = reinterpret_cast<CUdeviceptr>(op.address);
    if (op.wait) {
      params.waitValue = {};
      params.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
      params.waitValue.address = address;
      params.waitValue.value64 = op.value;
      params.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    } else {
      params.writeValue = {};
      params.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
      params.writeValue.address = address;
      params.writeValue.value64 = op.value;
      // With the barrier: earlier copies and kernels of the stream are visible before the value.
      params.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
  }
  CheckDriver(driver_.stream_batch_mem_op(ToCuda(stream), static_cast<unsigned>(params_.size()),
                                          params_.data(), 0),
              "memory operations");
}

}  // namespace

std::unique_ptr<Device> MakeCudaDevice(int index, int sum_ctas) {
  return std::make_unique<CudaDevice>(index, sum_ctas);
}

}  // namespace tide::nccl
