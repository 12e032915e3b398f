#include "fabric/nccl/nccl_fabric.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "fabric/nccl/agreement.h"
#include "fabric/nccl/stream_search.h"
#include "tide/error.h"
#include "tide/plan.h"

namespace tide::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kPollPause{20};
// What the programs of all lanes use; further ones would not be looked at.
constexpr int kStreamsOfANode = 8;
constexpr int kStreamsOfNodes = 16;
// How long the destructor waits for the other ranks to end, too.
constexpr std::chrono::seconds kLeaveTimeout{10};
constexpr const char* kMulticast = "multicast inside a node";

// With one hardware queue a stream that waits for a peer holds up every other stream of the GPU.
void CheckConnections() {
  const char* value = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (value == nullptr || std::strcmp(value, "1") != 0) return;
  throw Error(
      ErrorCode::kUnsupported,
      "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue, where a wait "
      "for a peer would hold up compute; set it to 32 or leave it unset");
}

// Where either variable is set, no multicast object may be made.
void CheckMulticastWanted(const CommunicatorOptions& options) {
  for (const auto& [name, off] :
       {std::pair("NCCL_NVLS_ENABLE", "0"), std::pair("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")}) {
    const char* value = std::getenv(name);
    if (value == nullptr || std::strcmp(value, off) != 0) continue;
    throw Error(ErrorCode::kUnsupported, fmt::format("switched off by {}={}", name, off));
  }
  if (!options.multicast) {
    throw Error(ErrorCode::kUnsupported, "off by default; TIDE_MULTICAST=on asks for it");
  }
}

// The caller's memory where it gives some, else NCCL's own.
AllocateSegment MakeAllocator(const CommunicatorOptions& options,
                              const std::shared_ptr<NcclLibrary>& library) {
  return [ask_first = options.allocate_segment, library](int64_t bytes) {
    std::shared_ptr<void> memory = ask_first ? ask_first(bytes) : nullptr;
    if (memory != nullptr) return memory;
    return std::shared_ptr<void>(library->Allocate(bytes),
                                 [library](void* address) { library->Free(address); });
  };
}

}  // namespace

NcclFabric::NcclFabric(Bootstrap& bootstrap, const CommunicatorOptions& options,
                       const MakeParts& make_parts, std::function<void(const std::string&)> expired)
    : bootstrap_(bootstrap),
      options_(options),
      topology_(SplitIntoNodes(bootstrap.world(), options.nodes)),
      counters_(std::make_unique<Counters>(topology_)) {
  TakeCapabilityStep(bootstrap, "nccl fabric", [&] {
    CheckConnections();
    parts_ = make_parts();
    parts_.device->MakeCurrent();
  });
  unicast_reason_ = TakeOptionalStep(bootstrap, kMulticast, [&] { CheckMulticastWanted(options); });
  peers_ = std::make_unique<Peers>(bootstrap, topology_, options.timeout);
  Connect();
  segments_ = std::make_unique<Segments>(MakeAllocator(options_, parts_.library),
                                         machine::MemoryBudget(options_), *parts_.device,
                                         communicators_, bootstrap_, topology_);
  counter_memory_ = segments_->Add(counters_->bytes(), "counters");
  // A step after the other: the second makes multicast objects, on all ranks or on none.
  if (unicast_reason_.empty()) {
    unicast_reason_ = TakeOptionalStep(bootstrap, kMulticast, [&] { CheckMulticast(); });
  }
  if (unicast_reason_.empty()) {
    unicast_reason_ = TakeOptionalStep(bootstrap, kMulticast, [&] { segments_->FindMulticast(); });
  }
  WatchdogOptions watchdog;
  watchdog.timeout = options.timeout;
  watchdog.expired = std::move(expired);
  watchdog.read_counters = [device = parts_.device.get(), memory = counter_memory_] {
    std::vector<uint64_t> values(static_cast<size_t>(memory.bytes) / sizeof(uint64_t));
    device->MakeCurrentInBackground();
    device->Read(values.data(), memory.address, memory.bytes);
    return values;
  };
  watchdog_ =
      std::make_unique<Watchdog>(rank(), *parts_.device, *counters_, *peers_, std::move(watchdog));
  executor_ = std::make_unique<Executor>(rank(), topology_, *parts_.device, communicators_,
                                         *segments_, counter_memory_.id, *counters_, *watchdog_);
  try {
    WarmUp();
  } catch (...) {
    executor_->KeepPrograms();
    Abandon();
    throw;
  }
}

void NcclFabric::Connect() {
  std::string mine;
  TakeStep(bootstrap_, "naming the communicator", "", [&] {
    if (rank() == 0) mine = parts_.library->UniqueId();
  });
  const std::string id = bootstrap_.AllGather(mine)[0];
  TakeStep(bootstrap_, "connecting the ranks", parts_.library->Description(), [&] {
    // One-sided operations are the rails'; each communicator that has them costs a thread.
    communicators_.parent =
        parts_.library->Init(id, topology_.Ranks(), rank(), {.multicast = unicast_reason_.empty()});
  });
  if (topology_.nodes > 1) {
    TakeStep(bootstrap_, "connecting the rails", "", [&] {
      for (auto& rail : communicators_.rails) {
        rail = communicators_.parent->Split(topology_.Local(rank()), topology_.Node(rank()),
                                            {kMaxContexts, kRailSignals});
      }
    });
  }
  TakeCapabilityStep(bootstrap_, "nccl fabric", [&] { CheckProperties(); });
}

void NcclFabric::CheckProperties() const {
  const int teams = communicators_.parent->Properties().lsa_teams;
  // Virtual nodes reach further than they need; the ranks of a node must reach each other.
  if (teams < 1 || topology_.nodes % teams != 0) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} finds {} groups of ranks that reach each other's memory, expected "
                            "the {} nodes, or fewer; ranks must be ordered node by node, with peer "
                            "access inside a node",
                            parts_.library->Description(), teams, topology_.nodes));
  }
  const NcclCommunicator* rail = communicators_.rail(Lane::kAllGather);
  if (rail == nullptr) return;
  if (!communicators_.rail(Lane::kAllGather)->Properties().one_sided) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} has no one-sided operations between nodes here; expected InfiniBand "
                    "or RoCE with GPUDirect RDMA, NCCL_CROSS_NIC other than 0, and "
                    "NCCL_RMA_DISABLE unset",
                    parts_.library->Description()));
  }
}

void NcclFabric::CheckMulticast() const {
  if (topology_.local_ranks == 1) {
    throw Error(ErrorCode::kUnsupported, "a node has one rank");
  }
  const CommunicatorProperties properties = communicators_.parent->Properties();
  if (!properties.multimem) {
    throw Error(ErrorCode::kUnsupported, parts_.library->Description() + " has none here");
  }
  // An address writes to all ranks that reach each other, and adds what they have.
  if (properties.lsa_teams != topology_.nodes) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("it spans {} ranks, a virtual node has {}",
                            topology_.Ranks() / properties.lsa_teams, topology_.local_ranks));
  }
}

// A step, so that a rank whose compute does not come to its end is no riddle to the others.
void NcclFabric::ChooseStreams() {
  TakeStep(bootstrap_, "choosing streams", "", [&] {
    if (options_.compute_streams.empty()) return;
    const int count = topology_.nodes > 1 ? kStreamsOfNodes : kStreamsOfANode;
    FoundStreams found =
        FindStreams(*parts_.device, options_.compute_streams, count, [&](EventHandle event) {
          WaitFor(event, "what the caller's streams hold", options_.timeout);
        });
    executor_->Adopt(std::move(found.streams));
    aliased_streams_ = found.aliases;
  });
}

// First operations set things up, collectively. Every lane's happen here, and end here.
void NcclFabric::WarmUp() {
  ChooseStreams();
  for (const Lane lane : {Lane::kControl, Lane::kAllGather, Lane::kReduceScatter}) {
    RunBarrier(lane, options_.timeout);
  }
}

void NcclFabric::RunBarrier(Lane lane, std::chrono::nanoseconds timeout) {
  Program barrier = PlanBarrier(topology_, rank());
  barrier.lane = lane;
  const Binding binding;
  Call call;
  call.program = &barrier;
  call.binding = &binding;
  std::strncpy(call.identity.text, "barrier", kCallTextBytes - 1);
  WaitFor(executor_->Run(call, executor_->Prepare(barrier)), "barrier", timeout);
}

NcclFabric::~NcclFabric() {
  try {
    if (!failed_) Leave();
  } catch (const std::exception& error) {
    std::fprintf(stderr,
                 "tide: rank %d: ending the nccl fabric: %s; its memory is kept until the process "
                 "ends\n",
                 rank(), error.what());
    failed_ = true;
  }
  if (failed_) Abandon();
}

void NcclFabric::Leave() {
  const auto timeout = std::min<std::chrono::nanoseconds>(options_.timeout, kLeaveTimeout);
  for (const EventHandle end : executor_->MarkEnds()) WaitFor(end, "streams", timeout);
  RunBarrier(Lane::kControl, timeout);
}

// Streams may wait for ever, and so would everything that ends them or frees what they use. The
// watchdog goes on: it ends the process if they do.
void NcclFabric::Abandon() {
  peers_->StopComparing();
  static_cast<void>(segments_.release());
  for (auto& rail : communicators_.rails) static_cast<void>(rail.release());
  static_cast<void>(communicators_.parent.release());
  static_cast<void>(executor_.release());
  static_cast<void>(watchdog_.release());
  static_cast<void>(peers_.release());     // the watchdog's
  static_cast<void>(counters_.release());  // the watchdog's last words name them
  static_cast<void>(parts_.device.release());
}

SegmentView NcclFabric::AddSegment(int64_t bytes, const std::string& label, SegmentKind /*kind*/) {
  return segments_->Add(bytes, label);
}

void NcclFabric::CheckRange(SegmentAddress address, int64_t bytes) const {
  segments_->CheckRange(address, bytes);
}

std::shared_ptr<Prepared> NcclFabric::Prepare(const Program& program) {
  try {
    return executor_->Prepare(program);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory || !options_.free_cached_memory) throw;
  }
  options_.free_cached_memory();
  return executor_->Prepare(program);
}

double NcclFabric::Execute(const Call& call, TraceSink* /*trace*/) {
  try {
    auto program = std::dynamic_pointer_cast<LoweredProgram>(call.prepared);
    TIDE_CHECK(program != nullptr);
    // Calls without a number are set-up, leaving, and measurements without synchronisation.
    if (call.identity.sequence != 0) peers_->Publish(call);
    const EventHandle done = executor_->Run(call, program);
    if (!call.streams) WaitFor(done, call.identity.text, options_.timeout);
    return 0;
  } catch (const Error& error) {
    GiveUp(error);
    throw;
  } catch (...) {
    // Not an error of TIDE's: check_interrupt threw.
    GiveUp(Error(ErrorCode::kPeerDead,
                 fmt::format("rank {} was interrupted in {}", rank(), call.identity.text)));
    throw;
  }
}

void NcclFabric::GiveUp(const Error& error) {
  peers_->LeaveWords(error);
  failed_ = true;
  executor_->KeepPrograms();
}

void NcclFabric::WaitFor(EventHandle event, const char* what, std::chrono::nanoseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (!parts_.device->Finished(event)) {
    if (Clock::now() > deadline) {
      throw Error(ErrorCode::kTimeout,
                  fmt::format("{} did not come to its end within {:.0f} s: look for the rank that "
                              "stopped earlier, or is in another call; a slow rank needs a longer "
                              "timeout",
                              what, std::chrono::duration<double>(timeout).count()),
                  {rank(), -1, "", what});
    }
    options_.check_interrupt();
    std::this_thread::sleep_for(kPollPause);
  }
}

}  // namespace tide::nccl
