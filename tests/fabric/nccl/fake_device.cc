// CUDA on host memory.
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "fabric/nccl/fake_parts.h"
#include "kernels/host/kernels.h"
#include "tide/error.h"

namespace tide::testing {
namespace {

using kernels::cuda::SumItem;
using kernels::cuda::ZeroItem;
using nccl::EventHandle;
using nccl::Stream;

struct FakeEvent {
  std::shared_ptr<bool> reached;  // of the last record; null before the first
};

char* At(const void* const* bases, const kernels::cuda::Operand& operand) {
  return static_cast<char*>(const_cast<void*>(bases[operand.base])) + operand.offset;
}

// A batch of copies as lines, one a copy and rank that it reaches. No copy writes to its source.
template <typename Args, typename Run>
std::vector<FakeWorld::Line> CopyLines(FakeWorld& world, std::span<const Args> batch, Run run) {
  std::vector<FakeWorld::Line> lines;
  for (const Args& copy : batch) {
    for (char* dst : world.Behind(copy.dst)) {
      TIDE_CHECK(dst != copy.src);
      Args one = copy;
      one.dst = dst;
      lines.push_back({[one, run] { run(one); }});
    }
  }
  return lines;
}

void CopyRows(const nccl::PitchedArgs& copy) {
  for (int64_t row = 0; row < copy.rows; ++row) {
    std::memcpy(static_cast<char*>(copy.dst) + row * copy.dst_pitch,
                static_cast<const char*>(copy.src) + row * copy.src_pitch,
                static_cast<size_t>(copy.row_bytes));
  }
}

class FakeSum final : public nccl::Kernel {
 public:
  FakeSum(FakeWorld& world, int rank, std::vector<SumItem> items)
      : world_(world), rank_(rank), items_(std::move(items)) {}

  void Launch(const void* const* bases, const kernels::cuda::SumCall& call,
              Stream stream) override {
    ++world_.calls(rank_).kernels;
    FakeWorld::Operation sum;
    sum.pause = true;
    // Addresses are kernel parameters: what they are now counts.
    for (const SumItem& item : items_) {
      std::vector<const void*> sources;
      for (const auto& source : item.sources) sources.push_back(At(bases, source));
      char* dst = At(bases, item.dst);
      sum.pause = sum.pause && sources.empty();
      sum.lines.push_back({[&item, dst, sources, call] {
        kernels::Sum(dst, item.dst_dtype, sources.data(), sources.size(), item.src_dtype,
                     call.scale, call.accumulate, static_cast<size_t>(item.elems));
      }});
    }
    world_.Append(QueueOf(stream), std::move(sum));
  }

 private:
  FakeWorld& world_;
  const int rank_;
  const std::vector<SumItem> items_;
};

// Element by element: where the own one does not hold it yet, all ranks' do.
class FakeRefresh final : public nccl::Kernel {
 public:
  FakeRefresh(FakeWorld& world, int rank, std::vector<SumItem> items)
      : world_(world), rank_(rank), items_(std::move(items)) {}

  void Launch(const void* const* bases, const kernels::cuda::SumCall& /*call*/,
              Stream stream) override {
    ++world_.calls(rank_).kernels;
    FakeWorld::Operation refresh;
    for (const SumItem& item : items_) {
      TIDE_CHECK(item.sources.size() == 1);
      std::vector<char*> places = {At(bases, item.dst)};
      for (const auto& copy : item.copies) places.push_back(At(bases, copy));
      refresh.lines.push_back({[&item, places, src = At(bases, item.sources[0])] {
        const size_t bytes = ItemSize(item.dst_dtype);
        std::vector<char> wanted(static_cast<size_t>(item.elems) * bytes);
        kernels::Cast(wanted.data(), item.dst_dtype, src, item.src_dtype,
                      static_cast<size_t>(item.elems));
        for (size_t at = 0; at < wanted.size(); at += bytes) {
          if (std::memcmp(places[0] + at, &wanted[at], bytes) == 0) continue;
          for (char* place : places) std::memcpy(place + at, &wanted[at], bytes);
        }
      }});
    }
    world_.Append(QueueOf(stream), std::move(refresh));
  }

 private:
  FakeWorld& world_;
  const int rank_;
  const std::vector<SumItem> items_;
};

// The switch's sum of one block: a part reads the block of a rank, the last stores.
class FakeMulticastSum final : public nccl::Kernel {
 public:
  FakeMulticastSum(FakeWorld& world, int rank, std::vector<SumItem> items)
      : world_(world), rank_(rank), items_(std::move(items)) {}

  void Launch(const void* const* bases, const kernels::cuda::SumCall& call,
              Stream stream) override {
    ++world_.calls(rank_).kernels;
    FakeWorld::Operation operation;
    for (const SumItem& item : items_) {
      TIDE_CHECK(item.sources.size() == 1 && item.src_dtype == DType::kF32);
      const std::vector<char*> behind = world_.Behind(At(bases, item.sources[0]));
      TIDE_CHECK(behind.size() > 1);
      const auto bytes = static_cast<size_t>(item.elems) * sizeof(float);
      const auto read = std::make_shared<std::vector<std::vector<char>>>();
      FakeWorld::Line& line = operation.lines.emplace_back();
      for (const char* block : behind) {
        line.push_back([read, block, bytes] { read->emplace_back(block, block + bytes); });
      }
      line.push_back([read, &item, dst = At(bases, item.dst), call] {
        std::vector<const void*> sources;
        for (const auto& block : *read) sources.push_back(block.data());
        kernels::Sum(dst, item.dst_dtype, sources.data(), sources.size(), DType::kF32, call.scale,
                     call.accumulate, static_cast<size_t>(item.elems));
      });
    }
    world_.Append(QueueOf(stream), std::move(operation));
  }

 private:
  FakeWorld& world_;
  const int rank_;
  const std::vector<SumItem> items_;
};

class FakeZero final : public nccl::Kernel {
 public:
  FakeZero(FakeWorld& world, int rank, std::vector<ZeroItem> items)
      : world_(world), rank_(rank), items_(std::move(items)) {}

  void Launch(const void* const* bases, const kernels::cuda::SumCall& /*call*/,
              Stream stream) override {
    ++world_.calls(rank_).kernels;
    FakeWorld::Operation zero;
    for (const ZeroItem& item : items_) {
      zero.lines.push_back({[dst = At(bases, item.dst), bytes = item.bytes] {
        std::memset(dst, 0, static_cast<size_t>(bytes));
      }});
    }
    world_.Append(QueueOf(stream), std::move(zero));
  }

 private:
  FakeWorld& world_;
  const int rank_;
  const std::vector<ZeroItem> items_;
};

class FakeDevice final : public nccl::Device {
 public:
  FakeDevice(std::shared_ptr<FakeWorld> world, int rank)
      : keeps_(std::move(world)), world_(*keeps_), rank_(rank) {}

  void MakeCurrent() override {}
  Stream CreateStream() override {
    ++world_.calls(rank_).streams;
    return world_.AddStream(rank_);
  }
  void DestroyStream(Stream stream) override { world_.EndStream(QueueOf(stream)); }
  EventHandle CreateEvent() override { return new FakeEvent; }
  void DestroyEvent(EventHandle event) override { delete static_cast<FakeEvent*>(event); }

  void Record(EventHandle event, Stream stream) override {
    ++world_.calls(rank_).events;
    auto reached = std::make_shared<bool>(false);
    {
      const std::lock_guard lock(world_.mutex());
      static_cast<FakeEvent*>(event)->reached = reached;
    }
    world_.Append(QueueOf(stream), {{}, {}, [reached] { *reached = true; }});
  }
  void Await(Stream stream, EventHandle event) override {
    ++world_.calls(rank_).events;
    const auto reached = static_cast<FakeEvent*>(event)->reached;
    if (reached == nullptr) return;
    world_.Append(QueueOf(stream), {[reached] { return *reached; }, {}, {}});
  }
  bool Finished(EventHandle event) override {
    std::shared_ptr<bool> reached;
    {
      const std::lock_guard lock(world_.mutex());
      reached = static_cast<FakeEvent*>(event)->reached;
    }
    return reached == nullptr || world_.Reached(*reached);
  }

  void Copy(std::span<const nccl::CopyArgs> batch, Stream stream) override {
    FakeCalls& calls = world_.calls(rank_);
    ++calls.copy_batches;
    calls.copies += static_cast<int>(batch.size());
    const auto run = [](const nccl::CopyArgs& copy) {
      std::memcpy(copy.dst, copy.src, static_cast<size_t>(copy.bytes));
    };
    world_.Append(QueueOf(stream), {{}, CopyLines(world_, batch, run), {}});
  }
  void CopyPitched(std::span<const nccl::PitchedArgs> batch, Stream stream) override {
    ++world_.calls(rank_).pitched;
    for (const nccl::PitchedArgs& copy : batch) {
      TIDE_CHECK(copy.dst_pitch >= copy.row_bytes && copy.src_pitch >= copy.row_bytes);
    }
    world_.Append(QueueOf(stream), {{}, CopyLines(world_, batch, CopyRows), {}});
  }
  void MemoryOps(std::span<const nccl::MemoryOp> batch, Stream stream) override {
    FakeCalls& calls = world_.calls(rank_);
    ++calls.memory_batches;
    calls.memory_ops += static_cast<int>(batch.size());
    TIDE_CHECK(!batch.empty() && batch.size() <= nccl::kMaxMemoryOps);
    for (const nccl::MemoryOp& op : batch) {
      if (op.wait) {
        world_.Append(QueueOf(stream), {[op] { return *op.address >= op.value; }, {}, {}});
      } else {
        world_.Append(QueueOf(stream), {{}, {}, [op] {
                                          TIDE_CHECK(*op.address < op.value);  // monotonic
                                          *op.address = op.value;
                                        }});
      }
    }
  }

  std::unique_ptr<nccl::Kernel> MakeCast(const std::vector<SumItem>& items) override {
    return MakeSum(items);
  }
  std::unique_ptr<nccl::Kernel> MakeSum(const std::vector<SumItem>& items) override {
    int& refused = world_.traits(rank_).refused_tables;
    if (refused > 0) {
      --refused;
      throw Error(ErrorCode::kOutOfMemory, "making a table: out of memory");
    }
    return std::make_unique<FakeSum>(world_, rank_, items);
  }
  std::unique_ptr<nccl::Kernel> MakeRefresh(const std::vector<SumItem>& items) override {
    return std::make_unique<FakeRefresh>(world_, rank_, items);
  }
  std::unique_ptr<nccl::Kernel> MakeMulticastSum(const std::vector<SumItem>& items) override {
    return std::make_unique<FakeMulticastSum>(world_, rank_, items);
  }
  std::unique_ptr<nccl::Kernel> MakeZero(const std::vector<ZeroItem>& items) override {
    return std::make_unique<FakeZero>(world_, rank_, items);
  }
  // Zero pages that nobody has touched yet, where it can: segments are large and mostly empty.
  void Clear(void* address, int64_t bytes) override {
    const auto size = static_cast<size_t>(bytes);
    if (madvise(address, size, MADV_DONTNEED) != 0) std::memset(address, 0, size);
  }
  uint64_t* HostWords() override { return host_words_; }
  void SetHostWord(uint64_t* word, uint64_t value) override {
    const std::lock_guard lock(world_.mutex());
    *word = value;
  }
  void Read(void* host, const void* address, int64_t bytes) override {
    const std::lock_guard lock(world_.mutex());
    std::memcpy(host, address, static_cast<size_t>(bytes));
  }

 private:
  const std::shared_ptr<FakeWorld> keeps_;
  FakeWorld& world_;
  const int rank_;
  uint64_t host_words_[2] = {};
};

}  // namespace

std::unique_ptr<nccl::Device> MakeFakeDevice(std::shared_ptr<FakeWorld> world, int rank) {
  return std::make_unique<FakeDevice>(std::move(world), rank);
}

}  // namespace tide::testing
