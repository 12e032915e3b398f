// Sums fed by bulk copies: one thread keeps a ring of slots in shared memory full, four warps add.
// (Paper, section 4.1: the warp-specialised pipeline.) A block has three such teams, each with a
// ring and tiles of its own: while one stores or looks up its next tile, the others add.
//
// A slot holds one source of one tile, so that the ring serves any number of sources and holds as
// many bytes in flight for two as for eight. A slot's pair of barriers: `full` completes when its
// bytes have landed, `empty` when all its warps have taken their quads into registers. Every
// warp passes the same slots in the same order as the producer. Nobody waits for another team,
// another block or another GPU.
#include <algorithm>

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/sum_kernels.cuh"
#include "kernels/cuda/sum_tile.cuh"

namespace tide::kernels::cuda::internal {
namespace {

constexpr int kAddWarps = 4;  // of a team
constexpr int kAddThreads = kAddWarps * kWarpThreads;
constexpr int kTeams = 3;
// And the producers' warps: 15 are four to a scheduler, which leaves each thread 128 registers.
constexpr int kBulkThreads = kTeams * (kAddThreads + kWarpThreads);
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
// Of a team. 192 KiB in flight are what a block needs to hide the latency of memory.
constexpr uint32_t kMaxSlots = 196608 / kTileBytes / kTeams;
constexpr uint32_t kMinSlots = 2;
constexpr uint32_t kBarrierBytes = (2 * kMaxSlots * sizeof(uint64_t) + 127) / 128 * 128;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A position in the ring and the parity of its turn.
struct Cursor {
  uint32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Next(uint32_t n_slots) {
    if (++slot == n_slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ Walk WalkOf(const LaunchArgs& args, const uint8_t* const* bases,
                                       uint32_t team) {
  return Walk(args, bases, blockIdx.x * kTeams + team, gridDim.x * kTeams);
}

// Shared memory: the barriers of all teams, then the slots of all teams.
struct Ring {
  uint64_t* full;
  uint64_t* empty;
  uint8_t* slots;
  uint32_t n_slots;

  __device__ __forceinline__ Ring(uint8_t* shared, uint32_t team, uint32_t slot_count)
      : full(reinterpret_cast<uint64_t*>(shared + team * kBarrierBytes)),
        empty(full + kMaxSlots),
        slots(shared + kTeams * kBarrierBytes + team * slot_count * kTileBytes),
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
__device__ __forceinline__ void Produce(Walk walk, Ring& ring) {
  Cursor at;
  for (; !walk.AtEnd(); walk.Next()) {
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

  __device__ __forceinline__ RingSource(Ring& ring, uint32_t team) : ring_(ring), team_(team) {}

  __device__ __forceinline__ Walk MakeWalk(const LaunchArgs& args,
                                           const uint8_t* const* bases) const {
    return WalkOf(args, bases, team_);
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
  const uint32_t team_;
  Cursor at_;
};

__device__ __forceinline__ void SumBulk(const LaunchArgs& args, const uint8_t* const* bases) {
  extern __shared__ __align__(128) uint8_t shared[];
  const bool adds = threadIdx.x < kTeams * kAddThreads;
  const uint32_t team =
      adds ? threadIdx.x / kAddThreads : (threadIdx.x - kTeams * kAddThreads) / kWarpThreads;
  Ring ring(shared, team, args.n_slots);
  if (!adds && threadIdx.x % kWarpThreads == 0) ring.Init();
  __syncthreads();
  if (!adds) {
    if (threadIdx.x % kWarpThreads == 0) Produce(WalkOf(args, bases, team), ring);
    return;
  }
  RingSource source(ring, team);
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
  const int64_t slots =
      std::min<int64_t>((limit_bytes / kTeams - kBarrierBytes) / kTileBytes, kMaxSlots);
  if (slots < kMinSlots) return {};
  return {static_cast<uint32_t>(slots),
          static_cast<uint32_t>(kTeams * (kBarrierBytes + slots * kTileBytes))};
}

}  // namespace tide::kernels::cuda::internal
