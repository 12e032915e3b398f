// Sums, casts, landings, refreshes and zeroing on a GPU, many tensors a launch.
//
//   SumBatch sums({{.dst = {0, 0}, .sources = {{1, 0}, {2, 4096}}, .elems = n,
//                   .dst_dtype = DType::kF32, .src_dtype = DType::kBF16}});   // once
//   const void* bases[] = {shard, staging, gradient};
//   sums.Launch(bases, {.scale = 0.25f, .accumulate = false, .ctas = 16}, stream);  // each call
//
// A batch is made once: its table of items goes to the memory of the current device, and the
// constructor returns when it is there. A launch passes base pointers as kernel parameters, copies
// nothing, allocates nothing and never synchronises; one kernel reaches 4080 bases, larger batches
// take several. Items of a batch run in any order. `ctas` short-lived thread blocks share the tiles
// of a batch; results don't depend on their number.
//
// A stream is a cudaStream_t. Everything throws tide::Error with CUDA's text. Launch from one
// thread at a time, with the device current that the batch was made on. A batch must outlive its
// launches: freeing its memory waits for the device.
//
// Results are bitwise those of kernels/host/kernels.h, payloads of NaNs aside.
#ifndef TIDE_KERNELS_CUDA_KERNELS_H_
#define TIDE_KERNELS_CUDA_KERNELS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "tide/dtype.h"

namespace tide::kernels::cuda {

using Stream = void*;

// Of the kernels below. Rises with every change to their speed: calibrations (tide calibrate) of
// other versions don't count.
inline constexpr int kSumVersion = 1;

// An address: base pointer number `base` of the launch plus `offset` bytes. It must be a multiple
// of the element's size.
struct Operand {
  int base = 0;
  int64_t offset = 0;
};

// dst = [dst +] scale * (fp32 sum of the sources in the listed order). dst may coincide exactly
// with a source of its type; other overlaps within a batch are not allowed.
struct SumItem {
  Operand dst = {};
  std::vector<Operand> sources = {};  // at least one
  int64_t elems = 0;
  DType dst_dtype = DType::kF32;
  DType src_dtype = DType::kF32;
  std::vector<Operand> copies = {};  // RefreshBatch: the places of dst at the other ranks
};

// How sources are read. All paths give the same bits, but for kMulticast, where the switch chooses
// the order of the additions.
enum class SumPath : uint8_t {
  kAuto,       // kBulk where the device has it, else kPlain
  kPlain,      // vector loads; sm_80 and newer
  kBulk,       // bulk copies into shared memory, written back from registers; sm_90 and newer
  kMulticast,  // each item has one fp32 source, a multicast address; sm_90 and newer
};

const char* Name(SumPath path);

struct SumCall {
  float scale = 1.0f;
  bool accumulate = false;
  int ctas = 16;
};

namespace internal {
class DeviceTable;
}

// A sum is also a cast (one source), and the landing of a wave: either the sources are the blocks
// of the node's ranks at one offset, in the order of the wave, read through peer pointers, or one
// multicast address. (Paper, sections 4.1 and 4.2.)
class SumBatch {
 public:
  explicit SumBatch(const std::vector<SumItem>& items, SumPath path = SumPath::kAuto);
  ~SumBatch();
  SumBatch(SumBatch&&) noexcept;
  SumBatch& operator=(SumBatch&&) noexcept;

  void Launch(const void* const* bases, const SumCall& call, Stream stream) const;
  // What kAuto became.
  SumPath path() const { return path_; }
  int64_t device_bytes() const;

 private:
  SumPath path_;
  uint32_t shared_bytes_ = 0;  // of each CTA on a bulk path, and the slots of its ring
  uint32_t n_slots_ = 0;
  std::unique_ptr<internal::DeviceTable> table_;
};

// Casts, or copies of equal types: where dst does not hold the result already, in bits, dst and its
// copies get it. Each item has one source; the bases of copies are as aligned as that of dst, to 16
// bytes.
class RefreshBatch {
 public:
  // Blocks that run together on a multiprocessor: a thread has only one group of elements on its
  // way at a time.
  static constexpr int kCtasAMultiprocessor = 4;

  explicit RefreshBatch(const std::vector<SumItem>& items);
  ~RefreshBatch();
  RefreshBatch(RefreshBatch&&) noexcept;
  RefreshBatch& operator=(RefreshBatch&&) noexcept;

  void Launch(const void* const* bases, int ctas, Stream stream) const;

 private:
  std::unique_ptr<internal::DeviceTable> table_;
};

struct ZeroItem {
  Operand dst = {};
  int64_t bytes = 0;
};

class ZeroBatch {
 public:
  explicit ZeroBatch(const std::vector<ZeroItem>& items);
  ~ZeroBatch();
  ZeroBatch(ZeroBatch&&) noexcept;
  ZeroBatch& operator=(ZeroBatch&&) noexcept;

  void Launch(void* const* bases, int ctas, Stream stream) const;

 private:
  std::unique_ptr<internal::DeviceTable> table_;
};

}  // namespace tide::kernels::cuda

#endif  // TIDE_KERNELS_CUDA_KERNELS_H_
