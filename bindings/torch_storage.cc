// The only file of TIDE that sees torch's C++ types. It needs c10/core/{Allocator,
// CachingDeviceAllocator,StorageImpl}.h and exports a plain C interface that Python loads with
// ctypes, so that the rest of TIDE does not depend on the version of torch.
//
// Three objects:
//   Slot     counts who uses one landing slot: its owner (the slot pool) and every storage whose
//            memory lies in it. The lease on the slot's segment is returned with the last of them,
//            so a tensor stays valid after the pool is gone.
//   Landing  the allocator of one parameter's unsharded storage. FSDP2 resizes that storage to zero
//            and back; an allocation takes the address bound for it, or else ordinary memory.
//   Segment  memory that torch's allocator gave out of a pool made for it alone. Nothing of Python
//            holds it or is needed to free it.
//
// Threads: binding and resizing of one storage happen in the thread that runs FSDP2. A storage may
// be released by any thread, with or without the GIL.

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>

namespace {

using ReleaseFn = void (*)(void*);

struct Slot {
  Slot(void* lease_context, ReleaseFn release_fn) : lease(lease_context), release(release_fn) {}

  std::atomic<int64_t> references{1};  // the owner, and one for each storage in the slot
  void* lease;
  ReleaseFn release;
};

// Acquire-release: the thread that returns the lease must see what every earlier user did.
void DropSlot(void* context) {
  auto* slot = static_cast<Slot*>(context);
  if (slot->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (slot->release != nullptr) slot->release(slot->lease);
  delete slot;
}

std::atomic<int64_t> landing_count{0};

class Landing final : public c10::Allocator {
 public:
  Landing(c10::Allocator* previous, c10::Device device) : previous_(previous), device_(device) {
    ++landing_count;
  }
  ~Landing() override { --landing_count; }

  void Bind(void* address, size_t bytes, Slot* slot) {
    address_ = address;
    bytes_ = bytes;
    slot_ = slot;
  }

  void Unbind() { Bind(nullptr, 0, nullptr); }

  // A size other than the bound one is not the resize that the binding was made for.
  c10::DataPtr allocate(size_t bytes) override {
    if (slot_ == nullptr || bytes == 0 || bytes != bytes_) return previous_->allocate(bytes);
    slot_->references.fetch_add(1, std::memory_order_relaxed);
    c10::DataPtr landed(address_, slot_, &DropSlot, device_);
    Unbind();
    return landed;
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    previous_->copy_data(destination, source, bytes);
  }

  c10::Allocator* previous() const { return previous_; }

 private:
  c10::Allocator* previous_;
  const c10::Device device_;
  void* address_ = nullptr;
  size_t bytes_ = 0;
  Slot* slot_ = nullptr;
};

struct Segment {
  c10::DataPtr memory;
  c10::MempoolId_t pool;
};

std::atomic<int64_t> segment_count{0};

// Torch's allocator ends with the process' statics. This library is loaded after it, and its exit
// handler runs before them: what is freed later stays with the driver.
std::atomic<bool> exiting{false};
[[maybe_unused]] const int at_exit = std::atexit([] { exiting = true; });

c10::StorageImpl* AsStorage(void* storage) { return static_cast<c10::StorageImpl*>(storage); }

}  // namespace

extern "C" {

void* tide_slot_open(void* lease, ReleaseFn release) { return new Slot(lease, release); }

void tide_slot_close(void* slot) { DropSlot(slot); }

// Number of storages whose memory lies in the slot.
int64_t tide_slot_live(const void* slot) {
  return static_cast<const Slot*>(slot)->references.load(std::memory_order_acquire) - 1;
}

// Takes the memory out of a storage, which is empty then. The pool that it came from has no other
// owner when it is released.
void* tide_segment_take(void* storage, uint64_t pool_first, uint64_t pool_second) {
  c10::StorageImpl* target = AsStorage(storage);
  c10::DataPtr memory = target->set_data_ptr(c10::DataPtr(nullptr, target->device()));
  target->set_nbytes(0);
  ++segment_count;
  return new Segment{std::move(memory), {pool_first, pool_second}};
}

// Gives the memory back to torch, and what its pool kept to whom it came from.
void tide_segment_release(void* segment) {
  if (exiting) return;
  auto* released = static_cast<Segment*>(segment);
  const c10::DeviceType device = released->memory.device().type();
  const c10::MempoolId_t pool = released->pool;
  try {
    delete released;
    --segment_count;
    auto* cache = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device));
    if (cache != nullptr) cache->emptyCache(pool);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tide: freeing a segment: %s\n", error.what());
  }
}

// Segments that exist.
int64_t tide_segment_count() { return segment_count.load(std::memory_order_relaxed); }

// Bytes of a storage; compared with torch's own answer when the library is loaded.
uint64_t tide_storage_bytes(void* storage) { return AsStorage(storage)->nbytes(); }

// Puts a new Landing in front of the storage's allocator. Null if the storage cannot be resized.
void* tide_landing_attach(void* storage) {
  c10::StorageImpl* target = AsStorage(storage);
  if (!target->resizable() || target->allocator() == nullptr) return nullptr;
  auto* landing = new Landing(target->allocator(), target->device());
  target->set_allocator(landing);
  return landing;
}

// Restores the earlier allocator; memory that the storage holds now stays as it is. Returns 0 and
// keeps the Landing, which something else may still point to, if it is not the storage's allocator.
int tide_landing_detach(void* landing, void* storage) {
  auto* attached = static_cast<Landing*>(landing);
  if (AsStorage(storage)->allocator() != attached) return 0;
  AsStorage(storage)->set_allocator(attached->previous());
  delete attached;
  return 1;
}

// Binds landings[i] to base + offsets[i] for its next allocation of exactly bytes[i].
void tide_landing_bind(void* const* landings, const uint64_t* offsets, const uint64_t* bytes,
                       uint64_t count, void* base, void* slot) {
  for (uint64_t i = 0; i < count; ++i) {
    static_cast<Landing*>(landings[i])
        ->Bind(static_cast<char*>(base) + offsets[i], bytes[i], static_cast<Slot*>(slot));
  }
}

void tide_landing_unbind(void* const* landings, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) static_cast<Landing*>(landings[i])->Unbind();
}

// Landings that exist; they live as long as a storage refers to them.
int64_t tide_landing_count() { return landing_count.load(std::memory_order_relaxed); }

}  // extern "C"
