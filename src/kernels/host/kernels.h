// Bytes and sums on the CPU: the inner loops of copy, cast, sum and zero operations.
//
//   const void* sources[] = {a, b, c};
//   kernels::Sum(out, DType::kF32, sources, 3, DType::kBF16, 0.25f, /*accumulate=*/false, elems);
//   kernels::StoreFence();
//   ready.store(1, std::memory_order_release);
//
// Pointers may have any alignment and counts may be zero. Large outputs are written with
// non-temporal stores, which later release stores do not order on every CPU: call StoreFence() once
// before publishing results to another thread or process. All functions are reentrant, allocate
// nothing and take no lock. The best instruction set of the running CPU is chosen at the first
// call; results are bitwise the same for all of them, except for the payload of a NaN that a sum
// produces.
#ifndef TIDE_KERNELS_HOST_KERNELS_H_
#define TIDE_KERNELS_HOST_KERNELS_H_

#include <cstddef>

#include "tide/dtype.h"

namespace tide::kernels {

// Ranges must not overlap.
void Copy(void* dst, const void* src, size_t bytes);

// Clears `bytes` bytes.
void Zero(void* dst, size_t bytes);

// Orders all earlier stores of this thread, also non-temporal ones, before its later release
// stores.
void StoreFence();

// Converts between bf16, fp16 and fp32, rounding to nearest even; equal types (u8 too) are copied.
// Denormals are kept, overflow gives infinity, NaNs stay NaNs (quiet). Ranges must not overlap.
// Throws Error(kInvalidArgument) for a conversion from or to u8.
void Cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t elems);

// out[i] = [out[i] +] scale * ((sources[0][i] + sources[1][i]) + sources[2][i] + ...), strictly in
// that order, in fp32, each operation rounded on its own and the result converted once to
// out_dtype. With no sources the sum is zero. `out` may coincide exactly with a source of the same
// type; other overlaps are not allowed. Throws Error(kInvalidArgument) if one of the types is u8.
void Sum(void* out, DType out_dtype, const void* const* sources, size_t n_sources,
         DType source_dtype, float scale, bool accumulate, size_t elems);

// Name of the instruction set in use, e.g. "AVX3".
const char* TargetName();

}  // namespace tide::kernels

#endif  // TIDE_KERNELS_HOST_KERNELS_H_
