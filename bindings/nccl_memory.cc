// NCCL's memory for torch's allocator: a torch.cuda.MemPool gets its segments here (see
// python/tide/fsdp/segment_memory.py). The two C functions have the signatures that torch's
// CUDAPluggableAllocator asks for, and are called by any thread, also while the process ends.
#include "nccl_memory.h"

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "fabric/nccl/nccl_library.h"
#include "tide/config.h"
#include "tide/error.h"

namespace {

struct Allocations {
  std::shared_ptr<tide::nccl::NcclLibrary> library = tide::nccl::LoadNccl(tide::NcclLibrary());
  std::mutex mutex;
  std::map<const void*, int64_t> bytes;
};

// Never destroyed: torch may free memory when statics are gone.
Allocations& Known() {
  static auto* known = new Allocations;
  return *known;
}

}  // namespace

int64_t NcclAllocationBytes(const void* address) {
  Allocations& known = Known();
  const std::lock_guard lock(known.mutex);
  const auto found = known.bytes.find(address);
  return found == known.bytes.end() ? 0 : found->second;
}

// Null is what torch takes for "out of memory": it frees what it keeps unused and asks again.
extern "C" __attribute__((visibility("default"))) void* TideNcclAllocate(size_t bytes,
                                                                         int /*device*/,
                                                                         void* /*stream*/) {
  try {
    Allocations& known = Known();
    void* address = known.library->Allocate(static_cast<int64_t>(bytes));
    const std::lock_guard lock(known.mutex);
    known.bytes[address] = static_cast<int64_t>(bytes);
    return address;
  } catch (const tide::Error&) {
    return nullptr;
  }
}

extern "C" __attribute__((visibility("default"))) void TideNcclFree(void* address, size_t /*bytes*/,
                                                                    int /*device*/,
                                                                    void* /*stream*/) {
  Allocations& known = Known();
  {
    const std::lock_guard lock(known.mutex);
    known.bytes.erase(address);
  }
  known.library->Free(address);
}
