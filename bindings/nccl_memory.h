// What torch's allocator holds of NCCL's memory.
#ifndef TIDE_BINDINGS_NCCL_MEMORY_H_
#define TIDE_BINDINGS_NCCL_MEMORY_H_

#include <cstdint>

// Bytes of the allocation that starts at `address`; 0 if torch did not get it from here.
int64_t NcclAllocationBytes(const void* address);

#endif  // TIDE_BINDINGS_NCCL_MEMORY_H_
