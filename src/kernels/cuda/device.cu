#include "kernels/cuda/cuda_error.cuh"
#include "kernels/cuda/device.h"

namespace tide::kernels::cuda {

using internal::Attribute;
using internal::CheckCuda;

std::string NoDeviceReason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return "";
  cudaGetLastError();
  return status == cudaSuccess ? "CUDA sees no device" : cudaGetErrorString(status);
}

DeviceInfo CurrentDevice() {
  int device = 0;
  CheckCuda(cudaGetDevice(&device), "asking for the current device");
  cudaDeviceProp properties;
  CheckCuda(cudaGetDeviceProperties(&properties, device), "asking for device properties");
  DeviceInfo info;
  info.name = properties.name;
  info.capability = properties.major * 10 + properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  CheckCuda(cudaDriverGetVersion(&info.driver_version), "asking for the driver's version");
  CheckCuda(cudaRuntimeGetVersion(&info.runtime_version), "asking for the runtime's version");
  return info;
}

void Synchronise(Stream stream) {
  CheckCuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "waiting for a stream");
}

void SynchroniseDevice() { CheckCuda(cudaDeviceSynchronize(), "waiting for the device"); }

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  CheckCuda(cudaMalloc(reinterpret_cast<void**>(&data_), bytes > 0 ? bytes : 1),
            "allocating " + std::to_string(bytes) + " bytes on the device");
}

// An error here is one of earlier work, and is reported by whoever waits for that work.
DeviceMemory::~DeviceMemory() { cudaFree(data_); }

void DeviceMemory::CopyFrom(const void* host) {
  CheckCuda(cudaMemcpy(data_, host, bytes_, cudaMemcpyHostToDevice),
            "copying " + std::to_string(bytes_) + " bytes to the device");
  // A copy from pageable memory may return before its last bytes have landed.
  Synchronise(nullptr);
}

void DeviceMemory::CopyTo(void* host) const {
  CheckCuda(cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost),
            "copying " + std::to_string(bytes_) + " bytes from the device");
}

OwnedStream::OwnedStream() {
  cudaStream_t stream = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  stream_ = stream;
}

OwnedStream::~OwnedStream() { cudaStreamDestroy(static_cast<cudaStream_t>(stream_)); }

StreamTimer::StreamTimer() {
  cudaEvent_t event = nullptr;
  CheckCuda(cudaEventCreate(&event), "making an event");
  begin_ = event;
  CheckCuda(cudaEventCreate(&event), "making an event");
  end_ = event;
}

StreamTimer::~StreamTimer() {
  cudaEventDestroy(static_cast<cudaEvent_t>(begin_));
  cudaEventDestroy(static_cast<cudaEvent_t>(end_));
}

void StreamTimer::Start(Stream stream) {
  CheckCuda(cudaEventRecord(static_cast<cudaEvent_t>(begin_), static_cast<cudaStream_t>(stream)),
            "recording an event");
}

void StreamTimer::Stop(Stream stream) {
  CheckCuda(cudaEventRecord(static_cast<cudaEvent_t>(end_), static_cast<cudaStream_t>(stream)),
            "recording an event");
}

double StreamTimer::Milliseconds() const {
  CheckCuda(cudaEventSynchronize(static_cast<cudaEvent_t>(end_)), "waiting for an event");
  float milliseconds = 0;
  CheckCuda(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin_),
                                 static_cast<cudaEvent_t>(end_)),
            "reading the time between events");
  return milliseconds;
}

}  // namespace tide::kernels::cuda
