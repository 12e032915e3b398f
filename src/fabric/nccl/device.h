// What the nccl fabric needs of CUDA and NCCL, one virtual function an API call, without their
// types.
//
// Everything above this file is plain C++: it builds without a CUDA toolkit and is tested with a
// fake that executes on host memory (tests/fabric/nccl). cuda_device.cc and nccl_library.cc are the
// real thing. Streams and events are opaque handles. All functions enqueue and return, unless they
// say otherwise, and throw tide::Error. One thread at a time, but for the watchdog's, which calls
// Device::MakeCurrentInBackground, Finished and Read beside it.
#ifndef TIDE_FABRIC_NCCL_DEVICE_H_
#define TIDE_FABRIC_NCCL_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/kernels.h"

namespace tide::nccl {

using Stream = void*;       // cudaStream_t
using EventHandle = void*;  // cudaEvent_t
using Window = void*;       // ncclWindow_t

// Copies of one batch run in any order.
struct CopyArgs {
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t bytes = 0;
};

struct PitchedArgs {
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t row_bytes = 0;
  int64_t rows = 0;
  int64_t dst_pitch = 0;
  int64_t src_pitch = 0;
};

// Waits block the stream until the 64-bit value is at least `value`; writes follow everything
// earlier in the stream, with a fence of system scope.
struct MemoryOp {
  bool wait = false;
  uint64_t* address = nullptr;
  uint64_t value = 0;
};

// cuStreamBatchMemOp takes fewer than 256 operations (cuda.h).
inline constexpr size_t kMaxMemoryOps = 255;

// A kernel over a table that was made once. `bases` are the pointers that its items count from.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void Launch(const void* const* bases, const kernels::cuda::SumCall& call,
                      Stream stream) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  // Makes the device current on the calling thread. Every thread calls it once.
  virtual void MakeCurrent() = 0;
  // The same on a thread of the fabric's own. What it calls from then on is legal also while other
  // threads capture a graph, and leaves their captures valid.
  virtual void MakeCurrentInBackground() { MakeCurrent(); }

  // Not blocked by the legacy stream, of the highest priority.
  virtual Stream CreateStream() = 0;
  virtual void DestroyStream(Stream stream) = 0;
  virtual EventHandle CreateEvent() = 0;
  virtual void DestroyEvent(EventHandle event) = 0;
  virtual void Record(EventHandle event, Stream stream) = 0;
  // Waits for what the event's last Record before this call stands for.
  virtual void Await(Stream stream, EventHandle event) = 0;
  // Whether the last Record has been reached. From any thread; does not block.
  virtual bool Finished(EventHandle event) = 0;

  virtual void Copy(std::span<const CopyArgs> batch, Stream stream) = 0;
  virtual void CopyPitched(std::span<const PitchedArgs> batch, Stream stream) = 0;
  // At most kMaxMemoryOps.
  virtual void MemoryOps(std::span<const MemoryOp> batch, Stream stream) = 0;

  // Blocks until the table is on the device; once a program.
  virtual std::unique_ptr<Kernel> MakeSum(const std::vector<kernels::cuda::SumItem>& items) = 0;
  virtual std::unique_ptr<Kernel> MakeCast(const std::vector<kernels::cuda::SumItem>& items) = 0;
  // Each item has one source, and copies that lie as dst at other ranks.
  virtual std::unique_ptr<Kernel> MakeRefresh(const std::vector<kernels::cuda::SumItem>& items) = 0;
  // Each item has one fp32 source, a multicast address.
  virtual std::unique_ptr<Kernel> MakeMulticastSum(
      const std::vector<kernels::cuda::SumItem>& items) = 0;
  virtual std::unique_ptr<Kernel> MakeZero(const std::vector<kernels::cuda::ZeroItem>& items) = 0;

  // Two words of host memory that streams reach, zero at first; the device's own.
  virtual uint64_t* HostWords() = 0;
  // Sets one of them at once, whatever streams hold.
  virtual void SetHostWord(uint64_t* word, uint64_t value) = 0;

  // Block until they are done. Set-up and last words only.
  virtual void Clear(void* address, int64_t bytes) = 0;
  virtual void Read(void* host, const void* address, int64_t bytes) = 0;
};

// One transfer to a peer of a communicator: data, then one increment of a signal there.
struct Transfer {
  int peer = 0;  // rank of the communicator
  const void* src = nullptr;
  int64_t bytes = 0;  // 0: the signal alone
  Window window = nullptr;
  int64_t offset = 0;  // bytes into the peer's window
  int signal = 0;
  int context = 0;
};

// Waits for `count` more increments than earlier waits of the same signal have asked for.
struct SignalWait {
  int peer = 0;
  int signal = 0;
  int context = 0;
  int count = 0;
};

struct CommunicatorSettings {
  int contexts = 0;  // 0: no one-sided operations
  int signals = 0;   // of each context
  bool multicast =
      false;  // may be asked for multicast addresses; else it makes no multicast object
};

struct CommunicatorProperties {
  bool one_sided = false;  // ncclPutSignal works between its ranks
  int lsa_teams = 0;       // groups of ranks that reach each other's memory
  bool multimem = false;   // its windows have multicast addresses, each for one such group
};

// One ncclComm_t. Its operations run one after the other, in the order in which they are issued,
// whatever streams they are on.
class NcclCommunicator {
 public:
  virtual ~NcclCommunicator() = default;
  virtual CommunicatorProperties Properties() = 0;
  // Collective, blocks. `color` groups ranks, `key` orders them.
  virtual std::unique_ptr<NcclCommunicator> Split(int color, int key,
                                                  const CommunicatorSettings& settings) = 0;
  // Collective, blocks. The whole allocation at `address`; throws Error(kUnsupported) if NCCL makes
  // no window.
  virtual Window Register(void* address, int64_t bytes) = 0;
  virtual void Deregister(Window window) = 0;
  // Where the peer's window starts in this process; null if its memory can't be reached.
  virtual void* PeerPointer(Window window, int peer) = 0;
  // Collective; the first call makes multicast objects. What is written there lands in the window
  // of every rank of the own LSA team; null if there is no such address.
  virtual void* MulticastPointer(Window window) = 0;

  // All transfers in one group. Transfers to one peer and context arrive in order.
  virtual void Send(std::span<const Transfer> transfers, Stream stream) = 0;
  virtual void Wait(std::span<const SignalWait> waits, Stream stream) = 0;
};

class NcclLibrary {
 public:
  virtual ~NcclLibrary() = default;
  // "NCCL 2.32.3 from /path/libnccl.so.2".
  virtual std::string Description() const = 0;
  virtual std::string UniqueId() = 0;
  // Collective, blocks.
  virtual std::unique_ptr<NcclCommunicator> Init(const std::string& unique_id, int world, int rank,
                                                 const CommunicatorSettings& settings) = 0;
  // Throws Error(kOutOfMemory).
  virtual void* Allocate(int64_t bytes) = 0;
  virtual void Free(void* address) = 0;
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_DEVICE_H_
