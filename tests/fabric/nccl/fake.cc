#include "fabric/nccl/fake.h"

#include <fmt/format.h>
#include <sys/mman.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/host/kernels.h"
#include "tide/error.h"

namespace tide::testing {
namespace {

using kernels::cuda::SumItem;
using kernels::cuda::ZeroItem;
using nccl::EventHandle;
using nccl::Stream;
using nccl::Window;

struct FakeEvent {
  std::shared_ptr<bool> reached;  // of the last record; null before the first
};

// What the ranks of a communicator share.
struct FakeGroup {
  explicit FakeGroup(int ranks)
      : windows(static_cast<size_t>(ranks)), signals(static_cast<size_t>(ranks)) {}
  struct Range {
    char* start = nullptr;
    int64_t bytes = 0;
  };
  using Signal = std::tuple<int, int, int>;         // sender, signal, context
  std::vector<std::vector<Range>> windows;          // by rank, then number of the window
  std::vector<std::map<Signal, uint64_t>> signals;  // by rank: how often it was raised
};

FakeWorld::Queue* QueueOf(Stream stream) { return static_cast<FakeWorld::Queue*>(stream); }

char* At(const void* const* bases, const kernels::cuda::Operand& operand) {
  return static_cast<char*>(const_cast<void*>(bases[operand.base])) + operand.offset;
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
    FakeWorld::Operation operation;
    for (const nccl::CopyArgs& copy : batch) {
      operation.lines.push_back(
          {[copy] { std::memcpy(copy.dst, copy.src, static_cast<size_t>(copy.bytes)); }});
    }
    world_.Append(QueueOf(stream), std::move(operation));
  }
  void CopyPitched(std::span<const nccl::PitchedArgs> batch, Stream stream) override {
    ++world_.calls(rank_).pitched;
    FakeWorld::Operation operation;
    for (const nccl::PitchedArgs& copy : batch) {
      TIDE_CHECK(copy.dst_pitch >= copy.row_bytes && copy.src_pitch >= copy.row_bytes);
      operation.lines.push_back({[copy] { CopyRows(copy); }});
    }
    world_.Append(QueueOf(stream), std::move(operation));
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
    return std::make_unique<FakeSum>(world_, rank_, items);
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

class FakeCommunicator final : public nccl::NcclCommunicator {
 public:
  FakeCommunicator(FakeWorld& world, std::string name, int members, int rank, int world_rank,
                   nccl::CommunicatorSettings settings)
      : world_(world),
        name_(std::move(name)),
        members_(members),
        rank_(rank),
        world_rank_(world_rank),
        settings_(settings) {
    auto group = world_.Meet(name_, members, rank, std::make_shared<FakeGroup>(members));
    group_ = std::static_pointer_cast<FakeGroup>(group.at(0));
  }

  ~FakeCommunicator() override { world_.NoteEnd(world_rank_); }

  nccl::CommunicatorProperties Properties() override {
    const FakeTraits& traits = world_.traits(world_rank_);
    return {settings_.contexts > 0 && traits.one_sided, traits.lsa_teams};
  }

  std::unique_ptr<nccl::NcclCommunicator> Split(
      int color, int key, const nccl::CommunicatorSettings& settings) override {
    const std::string name = fmt::format("{}/{}", name_, splits_++);
    auto all =
        world_.Meet(name, members_, rank_, std::make_shared<std::pair<int, int>>(color, key));
    int members = 0;
    int rank = 0;
    for (const auto& [other, value] : all) {
      const auto& theirs = *std::static_pointer_cast<std::pair<int, int>>(value);
      if (theirs.first != color) continue;
      ++members;
      if (theirs.second < key) ++rank;
    }
    return std::make_unique<FakeCommunicator>(world_, fmt::format("{}:{}", name, color), members,
                                              rank, world_rank_, settings);
  }

  Window Register(void* address, int64_t bytes) override {
    auto& own = group_->windows[static_cast<size_t>(rank_)];
    {
      const std::lock_guard lock(world_.mutex());
      own.push_back({static_cast<char*>(address), bytes});
    }
    world_.Meet(fmt::format("{}, window {}", name_, own.size()), members_, rank_, nullptr);
    if (!world_.traits(world_rank_).windows) {
      throw Error(ErrorCode::kUnsupported, "no symmetric windows");
    }
    return reinterpret_cast<Window>(own.size());
  }
  void Deregister(Window /*window*/) override {}
  void* PeerPointer(Window window, int peer) override {
    const std::lock_guard lock(world_.mutex());
    return world_.traits(world_rank_).peer_pointers ? Range(window, peer).start : nullptr;
  }

  void Send(std::span<const nccl::Transfer> transfers, Stream stream) override {
    FakeCalls& calls = world_.calls(world_rank_);
    ++calls.sends;
    calls.transfers += static_cast<int>(transfers.size());
    std::map<std::pair<int, int>, FakeWorld::Line> lines;  // by peer and context
    for (const nccl::Transfer& transfer : transfers) {
      TIDE_CHECK(transfer.signal < settings_.signals && transfer.context < settings_.contexts);
      TIDE_CHECK(transfer.peer != rank_);
      char* dst = nullptr;
      if (transfer.bytes > 0) {
        const std::lock_guard lock(world_.mutex());
        const FakeGroup::Range range = Range(transfer.window, transfer.peer);
        TIDE_CHECK(transfer.offset >= 0 && transfer.offset + transfer.bytes <= range.bytes);
        TIDE_CHECK(InOwnWindow(transfer.src, transfer.bytes));
        dst = range.start + transfer.offset;
      }
      FakeWorld::Line& line = lines[{transfer.peer, transfer.context}];
      if (dst != nullptr) {
        line.push_back([transfer, dst] {
          std::memcpy(dst, transfer.src, static_cast<size_t>(transfer.bytes));
        });
      }
      line.push_back([this, transfer] {
        ++group_->signals[static_cast<size_t>(transfer.peer)]
                         [{rank_, transfer.signal, transfer.context}];
      });
    }
    FakeWorld::Operation operation;
    for (auto& [key, line] : lines) operation.lines.push_back(std::move(line));
    Append(stream, std::move(operation));
  }

  void Wait(std::span<const nccl::SignalWait> waits, Stream stream) override {
    ++world_.calls(world_rank_).rail_waits;
    for (const nccl::SignalWait& wait : waits) {
      TIDE_CHECK(wait.count > 0 && wait.signal < settings_.signals);
      const FakeGroup::Signal signal{wait.peer, wait.signal, wait.context};
      const uint64_t target = expected_[signal] += static_cast<uint64_t>(wait.count);
      const auto arrived = [this, signal, target] {
        return group_->signals[static_cast<size_t>(rank_)][signal] >= target;
      };
      Append(stream, {arrived, {}, {}});
    }
  }

 private:
  FakeGroup::Range Range(Window window, int rank) {
    return group_->windows[static_cast<size_t>(rank)].at(reinterpret_cast<uintptr_t>(window) - 1);
  }
  bool InOwnWindow(const void* src, int64_t bytes) {
    for (const FakeGroup::Range& range : group_->windows[static_cast<size_t>(rank_)]) {
      const auto* at = static_cast<const char*>(src);
      if (at >= range.start && at + bytes <= range.start + range.bytes) return true;
    }
    return false;
  }
  // Operations of a communicator run one after the other, whatever their streams.
  void Append(Stream stream, FakeWorld::Operation operation) {
    if (world_.order() != Order::kUnordered) {
      auto before = std::exchange(last_, std::make_shared<bool>(false));
      operation.runnable = [before, runnable = std::move(operation.runnable)] {
        return (before == nullptr || *before) && (!runnable || runnable());
      };
      operation.end = [done = last_] { *done = true; };
    }
    world_.Append(QueueOf(stream), std::move(operation));
  }

  FakeWorld& world_;
  const std::string name_;
  const int members_;
  const int rank_;
  const int world_rank_;
  const nccl::CommunicatorSettings settings_;
  std::shared_ptr<FakeGroup> group_;
  int splits_ = 0;
  std::map<FakeGroup::Signal, uint64_t> expected_;
  std::shared_ptr<bool> last_;
};

class FakeLibrary final : public nccl::NcclLibrary {
 public:
  FakeLibrary(FakeWorld& world, int rank) : world_(world), rank_(rank) {}
  std::string Description() const override { return "fake NCCL"; }
  std::string UniqueId() override { return "id"; }
  std::unique_ptr<nccl::NcclCommunicator> Init(
      const std::string& unique_id, int world, int rank,
      const nccl::CommunicatorSettings& settings) override {
    return std::make_unique<FakeCommunicator>(world_, unique_id, world, rank, rank, settings);
  }
  void* Allocate(int64_t bytes) override {
    if (!world_.TakeMemory(rank_, bytes)) throw Error(ErrorCode::kOutOfMemory, "out of memory");
    return std::aligned_alloc(4096, static_cast<size_t>(bytes));
  }
  void Free(void* address) override {
    world_.NoteEnd(rank_);
    std::free(address);
  }

 private:
  FakeWorld& world_;
  const int rank_;
};

}  // namespace

void RunInStream(FakeWorld& world, Stream stream, FakeWorld::Work work) {
  world.Append(QueueOf(stream), {{}, {}, std::move(work)});
}

void PauseStream(FakeWorld& world, Stream stream) {
  world.Append(QueueOf(stream), {{}, {}, {}, /*pause=*/true});
}

#ifdef __SANITIZE_ADDRESS__
ExpectAbandoned::ExpectAbandoned() { __lsan_disable(); }
ExpectAbandoned::~ExpectAbandoned() { __lsan_enable(); }
#else
ExpectAbandoned::ExpectAbandoned() = default;
ExpectAbandoned::~ExpectAbandoned() = default;
#endif

nccl::MakeParts FakeParts(const std::shared_ptr<FakeWorld>& world, int rank) {
  return [world, rank] {
    return nccl::Parts{std::make_unique<FakeDevice>(world, rank),
                       std::make_shared<FakeLibrary>(*world, rank)};
  };
}

}  // namespace tide::testing
