// The few things of CUDA's runtime that batches, tests and benches share, without its types.
//
// Everything acts on the current device of the calling thread and throws tide::Error.
#ifndef TIDE_KERNELS_CUDA_DEVICE_H_
#define TIDE_KERNELS_CUDA_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/cuda/kernels.h"

namespace tide::kernels::cuda {

// Why no kernel can run here, e.g. "no CUDA-capable device is detected"; empty if one can.
std::string NoDeviceReason();

struct DeviceInfo {
  std::string name;
  int capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  int64_t shared_bytes = 0;  // that one thread block can have
  int driver_version = 0;    // 13000 for 13.0
  int runtime_version = 0;
};
DeviceInfo CurrentDevice();

// Blocks until the work of the stream, or of all streams, is done.
void Synchronise(Stream stream);
void SynchroniseDevice();

// Device memory at a multiple of 256 bytes. Freeing waits for the device.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Both block until the bytes are there.
  void CopyFrom(const void* host);
  void CopyTo(void* host) const;

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

class OwnedStream {
 public:
  OwnedStream();
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
};

// Time between two points of a stream.
class StreamTimer {
 public:
  StreamTimer();
  ~StreamTimer();
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  void Start(Stream stream);
  void Stop(Stream stream);
  // Blocks until the stop has been reached.
  double Milliseconds() const;

 private:
  void* begin_ = nullptr;
  void* end_ = nullptr;
};

}  // namespace tide::kernels::cuda

#endif  // TIDE_KERNELS_CUDA_DEVICE_H_
