// Batches: a table on the device and the launches over it.
#include <algorithm>
#include <utility>

#include "kernels/cuda/cuda_error.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/sum_kernels.cuh"
#include "kernels/cuda/walk.cuh"

namespace tide::kernels::cuda {
namespace internal {

struct LaunchShape {
  Kernel (*kernel)(bool many) = nullptr;
  int ctas = 0;
  uint32_t shared_bytes = 0;
  uint32_t n_slots = 0;
};

class DeviceTable {
 public:
  explicit DeviceTable(Table table) : parts_(std::move(table.parts)), memory_(table.bytes.size()) {
    memory_.CopyFrom(table.bytes.data());
  }

  int64_t device_bytes() const { return static_cast<int64_t>(memory_.bytes()); }

  void Launch(const void* const* bases, const LaunchShape& shape, LaunchArgs args,
              Stream stream) const {
    if (shape.ctas < 1) {
      throw Error(ErrorCode::kInvalidArgument,
                  "a launch needs at least 1 CTA, got " + std::to_string(shape.ctas));
    }
    args.n_slots = shape.n_slots;
    for (const Part& part : parts_) {
      if (part.bases.size() <= kFewBases) {
        LaunchPart<kFewBases>(part, bases, shape, args, stream);
      } else {
        LaunchPart<kManyBases>(part, bases, shape, args, stream);
      }
    }
  }

 private:
  template <int kBases>
  void LaunchPart(const Part& part, const void* const* bases, const LaunchShape& shape,
                  const LaunchArgs& args, Stream stream) const {
    LaunchParams<kBases> params;
    params.args = args;
    params.args.tile_items = reinterpret_cast<const uint32_t*>(memory_.data() + part.tile_items_at);
    params.args.items = reinterpret_cast<const TableItem*>(memory_.data() + part.items_at);
    params.args.operands = reinterpret_cast<const TableOperand*>(memory_.data() + part.operands_at);
    params.args.n_tiles = part.n_tiles;
    for (size_t slot = 0; slot < part.bases.size(); ++slot) {
      const void* base = bases[part.bases[slot]];
      if (base == nullptr || reinterpret_cast<uintptr_t>(base) % part.alignments[slot] != 0) {
        throw Error(ErrorCode::kInvalidArgument,
                    "base pointer " + std::to_string(part.bases[slot]) + " must be a multiple of " +
                        std::to_string(part.alignments[slot]) + " bytes and not null, got " +
                        std::to_string(reinterpret_cast<uintptr_t>(base)));
      }
      params.bases[slot] = static_cast<const uint8_t*>(base);
    }
    const Kernel kernel = shape.kernel(kBases == kManyBases);
    const auto ctas = static_cast<unsigned>(std::min<int64_t>(shape.ctas, part.n_tiles));
    void* arguments[] = {&params};
    CheckCuda(cudaLaunchKernel(kernel.function, dim3(ctas), dim3(kernel.threads), arguments,
                               shape.shared_bytes, static_cast<cudaStream_t>(stream)),
              "launching a batch of " + std::to_string(part.n_tiles) + " tiles on " +
                  std::to_string(ctas) + " CTAs");
  }

  std::vector<Part> parts_;
  DeviceMemory memory_;
};

namespace {

int Capability() {
  return Attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
         Attribute(cudaDevAttrComputeCapabilityMinor);
}

// What kAuto is on this device; throws if it can't do what was asked for.
SumPath ChoosePath(SumPath wanted, int64_t shared_limit) {
  const int capability = Capability();
  const auto refuse = [&](int needed) {
    throw Error(ErrorCode::kUnsupported,
                std::string("the path ") + Name(wanted) + " needs compute capability " +
                    std::to_string(needed / 10) +
                    ".0 or newer and shared memory for its ring, got " +
                    std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
                    " with " + std::to_string(shared_limit) +
                    " bytes a block; use SumPath::kAuto, or the stock path below 8.0");
  };
  if (capability < 80) refuse(80);
  const bool bulk = capability >= 90 && FitBulkMemory(shared_limit).slots > 0;
  switch (wanted) {
    case SumPath::kAuto:
      return bulk ? SumPath::kBulk : SumPath::kPlain;
    case SumPath::kBulk:
      if (!bulk) refuse(90);
      break;
    case SumPath::kMulticast:
      if (capability < 90) refuse(90);
      break;
    case SumPath::kPlain:
      break;
  }
  return wanted;
}

void CheckSumItems(const std::vector<SumItem>& items, SumPath path) {
  for (const SumItem& item : items) {
    if (item.dst_dtype == DType::kU8 || item.src_dtype == DType::kU8 || item.sources.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  std::string("a sum takes and gives bf16, fp16 or fp32 and has a source, got ") +
                      std::to_string(item.sources.size()) + " sources of " + Name(item.src_dtype) +
                      " and an output of " + Name(item.dst_dtype));
    }
    if (!item.copies.empty()) {
      throw Error(ErrorCode::kInvalidArgument, "a sum has one output, got " +
                                                   std::to_string(item.copies.size()) +
                                                   " copies; use RefreshBatch");
    }
    if (path == SumPath::kMulticast &&
        (item.sources.size() != 1 || item.src_dtype != DType::kF32)) {
      throw Error(ErrorCode::kInvalidArgument,
                  std::string("a landing through multicast has one fp32 source, got ") +
                      std::to_string(item.sources.size()) + " of " + Name(item.src_dtype));
    }
  }
}

Kernel (*KernelOf(SumPath path))(bool many) {
  switch (path) {
    case SumPath::kBulk:
      return BulkKernel;
    case SumPath::kMulticast:
      return MulticastKernel;
    case SumPath::kPlain:
    case SumPath::kAuto:
      break;
  }
  return PlainKernel;
}

}  // namespace
}  // namespace internal

const char* Name(SumPath path) {
  switch (path) {
    case SumPath::kAuto:
      return "auto";
    case SumPath::kPlain:
      return "plain";
    case SumPath::kBulk:
      return "bulk";
    case SumPath::kMulticast:
      return "multicast";
  }
  return "?";
}

SumBatch::SumBatch(const std::vector<SumItem>& items, SumPath path) {
  const int64_t limit = internal::Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  path_ = internal::ChoosePath(path, limit);
  internal::CheckSumItems(items, path_);
  if (path_ == SumPath::kBulk) {
    const auto memory = internal::FitBulkMemory(limit);
    shared_bytes_ = memory.bytes;
    n_slots_ = memory.slots;
    for (const bool many : {false, true}) {
      internal::CheckCuda(
          cudaFuncSetAttribute(internal::KernelOf(path_)(many).function,
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes_)),
          "reserving " + std::to_string(shared_bytes_) + " bytes of shared memory a CTA");
    }
  }
  table_ = std::make_unique<internal::DeviceTable>(internal::MakeTable(items));
}

SumBatch::~SumBatch() = default;
SumBatch::SumBatch(SumBatch&&) noexcept = default;
SumBatch& SumBatch::operator=(SumBatch&&) noexcept = default;

void SumBatch::Launch(const void* const* bases, const SumCall& call, Stream stream) const {
  internal::LaunchArgs args = {};
  args.scale = call.scale;
  args.accumulate = call.accumulate ? 1 : 0;
  table_->Launch(bases, {internal::KernelOf(path_), call.ctas, shared_bytes_, n_slots_}, args,
                 stream);
}

int64_t SumBatch::device_bytes() const { return table_->device_bytes(); }

namespace {

const std::vector<SumItem>& CheckRefreshItems(const std::vector<SumItem>& items) {
  for (const SumItem& item : items) {
    const bool bytes = item.dst_dtype == DType::kU8 || item.src_dtype == DType::kU8;
    if (item.sources.size() == 1 && (!bytes || item.dst_dtype == item.src_dtype)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                std::string("a refresh has one source, of the type of its output or both of "
                            "bf16, fp16 and fp32; got ") +
                    std::to_string(item.sources.size()) + " sources of " + Name(item.src_dtype) +
                    " and an output of " + Name(item.dst_dtype));
  }
  return items;
}

}  // namespace

RefreshBatch::RefreshBatch(const std::vector<SumItem>& items)
    : table_(
          std::make_unique<internal::DeviceTable>(internal::MakeTable(CheckRefreshItems(items)))) {}

RefreshBatch::~RefreshBatch() = default;
RefreshBatch::RefreshBatch(RefreshBatch&&) noexcept = default;
RefreshBatch& RefreshBatch::operator=(RefreshBatch&&) noexcept = default;

void RefreshBatch::Launch(const void* const* bases, int ctas, Stream stream) const {
  table_->Launch(bases, {internal::RefreshKernel, ctas, 0, 0}, {}, stream);
}

namespace {

std::vector<SumItem> WithoutSources(const std::vector<ZeroItem>& items) {
  std::vector<SumItem> result;
  for (const ZeroItem& item : items) {
    result.push_back({item.dst, {}, item.bytes, DType::kU8, DType::kU8});
  }
  return result;
}

}  // namespace

ZeroBatch::ZeroBatch(const std::vector<ZeroItem>& items)
    : table_(std::make_unique<internal::DeviceTable>(internal::MakeTable(WithoutSources(items)))) {}

ZeroBatch::~ZeroBatch() = default;
ZeroBatch::ZeroBatch(ZeroBatch&&) noexcept = default;
ZeroBatch& ZeroBatch::operator=(ZeroBatch&&) noexcept = default;

void ZeroBatch::Launch(void* const* bases, int ctas, Stream stream) const {
  table_->Launch(bases, {internal::ZeroKernel, ctas, 0, 0}, {}, stream);
}

}  // namespace tide::kernels::cuda
