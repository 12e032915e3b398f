// Bulk copies (TMA without tensor maps) and the barriers that they complete, sm_90 and newer.
#ifndef TIDE_KERNELS_CUDA_BULK_CUH_
#define TIDE_KERNELS_CUDA_BULK_CUH_

#include <cstdint>

namespace tide::kernels::cuda::internal {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(SharedAddress(barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers known to bulk copies, which come through another proxy.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives; everything that this thread did before happens before the wait of the other side.
__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(SharedAddress(barrier))
               : "memory");
}

// Arrives, and keeps the phase open until `bytes` more bytes have landed.
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void WaitBarrier(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}

// Addresses and bytes are multiples of 16. The barrier counts the bytes as they land.
__device__ __forceinline__ void BulkLoad(void* shared, const void* global, uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(SharedAddress(shared)), "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

}  // namespace tide::kernels::cuda::internal

#endif  // TIDE_KERNELS_CUDA_BULK_CUH_
