// NCCL on host memory.
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fabric/nccl/fake_parts.h"
#include "tide/error.h"

namespace tide::testing {
namespace {

using nccl::Stream;
using nccl::Window;

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
    if (settings.multicast) ++world_.calls(world_rank_).multicast_objects;
  }

  ~FakeCommunicator() override { world_.NoteEnd(world_rank_); }

  nccl::CommunicatorProperties Properties() override {
    const FakeTraits& traits = world_.traits(world_rank_);
    return {settings_.contexts > 0 && traits.one_sided, traits.lsa_teams, traits.multimem};
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

  void* MulticastPointer(Window window) override {
    ++world_.calls(world_rank_).multicast_objects;
    const FakeTraits& traits = world_.traits(world_rank_);
    TIDE_CHECK(settings_.multicast && traits.multimem);
    if (!traits.multicast_pointers) return nullptr;
    const int team = members_ / traits.lsa_teams;
    std::vector<char*> starts;
    int64_t bytes = 0;
    {
      const std::lock_guard lock(world_.mutex());
      for (int i = 0; i < team; ++i) {
        const FakeGroup::Range range = Range(window, rank_ / team * team + i);
        starts.push_back(range.start);
        bytes = range.bytes;
      }
    }
    return world_.AddMulticast(starts, bytes);
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
  std::string UniqueId() override {
    if (!world_.traits(rank_).unique_id) throw Error(ErrorCode::kInternal, "no network device");
    return "id";
  }
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

std::shared_ptr<nccl::NcclLibrary> MakeFakeLibrary(FakeWorld& world, int rank) {
  return std::make_shared<FakeLibrary>(world, rank);
}

}  // namespace tide::testing
