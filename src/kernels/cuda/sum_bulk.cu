// Sums fed by bulk copies: one thread keeps a ring of slots in shared memory full, two teams of
// eight warps add. (Paper, section 4.1: the warp-specialised pipeline.)
//
// A slot holds one source of one tile, so that the ring serves any number of sources and holds as
// many bytes in flight for two as for eight. A slot's pair of barriers: `full` completes when its
// bytes have landed, `empty` when all eight warps of a team have taken their quads into registers.
// Teams take tiles in turn, so that one adds while the other stores. Every warp passes the slots in
// the same order as the producer, and passes over those of the other team: the oldest slot that is
// not empty belongs to the oldest tile of its team, which will get the rest of its slots. Nobody
// waits for another block or for another GPU.
#include <algorithm>

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/sum_kernels.cuh"
#include "kernels/cuda/sum_tile.cuh"

namespace tide::kernels::cuda::internal {
namespace {

constexpr int kAddWarps = 8;  // of a team
constexpr int kAddThreads = kAddWarps * kWarpThreads;
constexpr int kTeams = 2;
constexpr int kBulkThreads = kTeams * kAddThreads + kWarpThreads;  // and the producer's warp
// Who says that a slot has been read. One lane a warp does, after __syncwarp, which orders the
// reads of the others before it. compute-sanitizer's racecheck does not follow that and reports
// every read of the other lanes; it finds nothing when each lane speaks for itself, at 5 % less
// speed with eight sources a block.
#ifdef TIDE_RACECHECK
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif
[[maybe_unused]] constexpr int kArrivals = kEveryLaneArrives ? kAddThreads : kAddWarps;
constexpr uint32_t kMaxSlots = 12;
constexpr uint32_t kMinSlots = 4;
constexpr uint32_t kBarrierBytes = 256;
static_assert(2 * kMaxSlots * sizeof(uint64_t) <= kBarrierBytes);

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A position in the ring and the parity of its turn.
struct Cursor {
  uint32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Next(uint32_t n_slots) { Skip(1, n_slots); }

  __device__ __forceinline__ void Skip(uint32_t count, uint32_t n_slots) {
    for (slot += count; slot >= n_slots; slot -= n_slots) parity ^= 1;
  }
};

struct Ring {
  uint64_t* full;
  uint64_t* empty;
  uint8_t* slots;
  uint32_t n_slots;

  __device__ __forceinline__ Ring(uint8_t* shared, uint32_t slot_count)
      : full(reinterpret_cast<uint64_t*>(shared)),
        empty(full + kMaxSlots),
        slots(shared + kBarrierBytes),
        n_slots(slot_count) {}

  __device__ __forceinline__ void Init() {
    for (uint32_t slot = 0; slot < n_slots; ++slot) {
      InitBarrier(full + slot, 1);
      InitBarrier(empty + slot, kArrivals);
    }
    FenceBarrierInit();
  }

  __device__ __forceinline__ uint8_t* Slot(uint32_t slot) { return slots + slot * kTileBytes; }
};

// One thread. The first turn of `empty` counts as complete: waiting for the parity before it
// succeeds at once.
__device__ __forceinline__ void Produce(const LaunchArgs& args, const uint8_t* const* bases,
                                        Ring& ring) {
  Cursor at;
  for (Walk walk(args, bases); !walk.AtEnd(); walk.Next()) {
    const Tile tile = walk.tile();
    const int64_t elem_bytes = Bytes(walk.item().src_dtype);
    const auto bytes = static_cast<uint32_t>((tile.body_end - tile.body_begin) * elem_bytes);
    if (bytes == 0) continue;
    for (uint32_t s = 0; s < walk.item().n_sources; ++s) {
      WaitBarrier(ring.empty + at.slot, at.parity ^ 1);
      ArriveExpecting(ring.full + at.slot, bytes);
      BulkLoad(ring.Slot(at.slot), walk.source(s) + tile.body_begin * elem_bytes, bytes,
               ring.full + at.slot);
      at.Next(ring.n_slots);
    }
  }
}

class RingSource {
 public:
  static constexpr int kThreads = kAddThreads;
  static constexpr bool kAhead = false;  // the ring is ahead

  __device__ __forceinline__ explicit RingSource(Ring& ring)
      : ring_(ring), turns_before_(threadIdx.x / kAddThreads) {}

  __device__ __forceinline__ bool Takes(const Walk& walk) {
    if (turns_before_ == 0) {
      turns_before_ = kTeams - 1;
      return true;
    }
    --turns_before_;
    const Tile tile = walk.tile();
    if (tile.body_begin < tile.body_end) at_.Skip(walk.item().n_sources, ring_.n_slots);
    return false;
  }

  template <class In>
  static __device__ __forceinline__ float LoadOne(const typename In::Scalar* from) {
    return In::Load(from);
  }

  // Past the end of a short body this reads what an earlier tile left: those quads are not stored.
  template <class In, int kQuads>
  __device__ __forceinline__ void Load(const Walk& /*walk*/, const Tile& /*tile*/, uint32_t /*s*/,
                                       typename In::Quad (&quads)[kQuads]) {
    WaitBarrier(ring_.full + at_.slot, at_.parity);
    const auto* from = reinterpret_cast<const typename In::Quad*>(ring_.Slot(at_.slot));
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      quads[u] = from[FirstQuad<In, kThreads>() + u * kWarpThreads];
    }
    __syncwarp();
    if (kEveryLaneArrives || threadIdx.x % kWarpThreads == 0) Arrive(ring_.empty + at_.slot);
    at_.Next(ring_.n_slots);
  }

 private:
  Ring& ring_;
  Cursor at_;
  uint32_t turns_before_;  // tiles of other teams before the next one of this team
};

__device__ __forceinline__ void SumBulk(const LaunchArgs& args, const uint8_t* const* bases) {
  extern __shared__ __align__(128) uint8_t shared[];
  Ring ring(shared, args.n_slots);
  if (threadIdx.x == 0) ring.Init();
  __syncthreads();
  if (threadIdx.x >= kTeams * kAddThreads) {
    if (threadIdx.x == kTeams * kAddThreads) Produce(args, bases, ring);
    return;
  }
  RingSource source(ring);
  SumTiles(args, bases, source);
}

#endif

template <int kBases>
__global__ void __launch_bounds__(kBulkThreads, 1)
    tide_sum_bulk(const __grid_constant__ LaunchParams<kBases> params) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  SumBulk(params.args, params.bases);
#endif
}

}  // namespace

Kernel BulkKernel(bool many) {
  return {many ? reinterpret_cast<const void*>(tide_sum_bulk<kManyBases>)
               : reinterpret_cast<const void*>(tide_sum_bulk<kFewBases>),
          kBulkThreads};
}

BulkMemory FitBulkMemory(int64_t limit_bytes) {
  const int64_t slots = std::min<int64_t>((limit_bytes - kBarrierBytes) / kTileBytes, kMaxSlots);
  if (slots < kMinSlots) return {};
  return {static_cast<uint32_t>(slots), static_cast<uint32_t>(kBarrierBytes + slots * kTileBytes)};
}

}  // namespace tide::kernels::cuda::internal
