#include "fabric/host/host_fabric.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fabric/host/memory_limit.h"
#include "layout/format_bytes.h"
#include "tide/error.h"

namespace tide::host {
namespace {

// Segments are whole pages.
constexpr int64_t kPageBytes = 4096;

// All local ranks reserve at once: this rank's share of what is available must hold its own need.
void CheckMemory(int64_t bytes, int local_ranks, int64_t limit_bytes, const std::string& label) {
  const MemoryLimit limit = ReadMemoryLimit(limit_bytes);
  const int64_t need = bytes * local_ranks;
  if (need > limit.available_bytes) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format(
            "{} needs {} on each of {} ranks, {} in all, but only {} is available ({}). Raise "
            "that limit, use fewer ranks or a smaller model.",
            label, FormatBytes(bytes), local_ranks, FormatBytes(need),
            FormatBytes(limit.available_bytes), limit.source));
  }
}

void SetText(Notice* notice, const std::string& text) {
  std::strncpy(notice->text, text.c_str(), sizeof notice->text - 1);
}

// An error unless all neighbours ask for the same; null if they do.
std::unique_ptr<Error> CompareRequests(const std::vector<ReceivedNotice>& notices, int rank,
                                       const std::string& what) {
  const Notice& ours = notices[static_cast<size_t>(rank)].notice;
  for (const ReceivedNotice& entry : notices) {
    const Notice& other = entry.notice;
    if (other.rank < 0 || other.error_code >= 0) continue;
    if (other.bytes == ours.bytes && std::strcmp(other.text, ours.text) == 0) continue;
    return std::make_unique<Error>(
        ErrorCode::kMismatch,
        fmt::format("adding a segment: rank {} asks for {} bytes of '{}', rank {} for {} bytes of "
                    "'{}'; expected the same request on every rank",
                    rank, ours.bytes, ours.text, other.rank, other.bytes, other.text),
        ErrorContext{rank, other.rank, "", what});
  }
  return nullptr;
}

Topology MakeTopology(int world, int nodes) {
  if (nodes < 1 || world % nodes != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("nodes: expected a divisor of {} ranks, so that all nodes have as many "
                            "ranks, got {}",
                            world, nodes));
  }
  return {nodes, world / nodes};
}

}  // namespace

HostFabric::HostFabric(Bootstrap& bootstrap, const CommunicatorOptions& options)
    : sockets_(bootstrap, MakeTopology(bootstrap.world(), options.nodes), options.timeout),
      memory_limit_bytes_(options.memory_limit_bytes) {
  ConnectControlPages();
  watchdog_ = std::make_unique<Watchdog>(sockets_, pages_[static_cast<size_t>(rank())]);
  executor_ = std::make_unique<Executor>(rank(), topology(), pages_,
                                         static_cast<const AddressSpace&>(*this), *watchdog_,
                                         options.timeout, options.check_interrupt);
}

void HostFabric::ConnectControlPages() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
    internal::ThrowErrno("reading random bytes");
  control_ = Share(ControlPageBytes(topology()), "control page", nonce);
  for (int peer = 0; peer < sockets_.world(); ++peer) {
    char* memory = control_->mappings[static_cast<size_t>(peer)].data();
    pages_.push_back(memory != nullptr ? ControlPage(memory, topology(), peer) : ControlPage());
  }
}

std::shared_ptr<Segment> HostFabric::Share(int64_t bytes, const std::string& label,
                                           uint64_t nonce) {
  const std::string what = "sharing " + label;
  Notice mine;
  mine.bytes = bytes;
  mine.nonce = nonce;
  SetText(&mine, label);
  std::unique_ptr<Error> error;
  FileDescriptor memory;
  Mapping own;
  try {
    CheckMemory(bytes, sockets_.world(), memory_limit_bytes_, label);
    memory = CreateMemory(bytes, label);
    own = Mapping(memory.get(), bytes);
    if (nonce != 0) std::memcpy(own.data(), &nonce, sizeof nonce);
  } catch (const Error& failure) {
    error = std::make_unique<Error>(failure);
    mine.error_code = static_cast<int32_t>(failure.code());
  }
  const auto received = sockets_.Exchange(mine, memory.get(), what);
  if (!error) error = CompareRequests(received, rank(), what);

  auto segment = std::make_shared<Segment>();
  segment->bytes = bytes;
  segment->mappings.resize(received.size());
  segment->mappings[static_cast<size_t>(rank())] = std::move(own);
  try {
    for (size_t peer = 0; !error && peer < received.size(); ++peer) {
      const ReceivedNotice& entry = received[peer];
      if (!sockets_.IsNeighbour(static_cast<int>(peer)) || entry.notice.error_code >= 0) continue;
      segment->mappings[peer] = Mapping(entry.memory.get(), bytes);
      if (nonce != 0 &&
          std::memcmp(segment->mappings[peer].data(), &entry.notice.nonce, sizeof nonce) != 0) {
        throw Error(ErrorCode::kUnsupported, fmt::format("memory of rank {} is not shared", peer));
      }
    }
  } catch (const Error& failure) {
    error = std::make_unique<Error>(failure);
  }
  // Nobody goes on before everybody has mapped: from here on peers may write.
  sockets_.Agree(error.get(), what);
  return segment;
}

SegmentView HostFabric::AddSegment(int64_t bytes, const std::string& label) {
  if (bytes <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("segment '{}': expected more than 0 bytes, got {}", label, bytes));
  }
  auto segment = Share(AlignUp(bytes, kPageBytes), label, 0);
  segment->bytes = bytes;
  SegmentView view;
  view.id = static_cast<int>(segments_.size());
  view.address = segment->mappings[static_cast<size_t>(rank())].data();
  view.bytes = bytes;
  view.owner = segment;
  segments_.push_back(std::move(segment));
  return view;
}

void HostFabric::CheckRange(SegmentAddress address, int64_t bytes) const {
  if (address.segment < 0 || address.segment >= static_cast<int>(segments_.size())) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("expected a segment in [0, {}), got {}",
                                                         segments_.size(), address.segment));
  }
  const int64_t room = segments_[static_cast<size_t>(address.segment)]->bytes;
  if (address.offset < 0 || bytes > room - address.offset) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} bytes at offset {} do not fit into segment {} of {} bytes", bytes,
                            address.offset, address.segment, room));
  }
}

char* HostFabric::Resolve(int rank, SegmentAddress address) const {
  const auto& segment = segments_[static_cast<size_t>(address.segment)];
  return segment->mappings[static_cast<size_t>(rank)].data() + address.offset;
}

// The others wait for this rank: tell them why it stops.
void HostFabric::GiveUp(const Error& error) {
  pages_[static_cast<size_t>(rank())].Fail(error);
  for (const ControlPage& page : pages_) {
    if (page.valid()) page.Ring();
  }
}

double HostFabric::Execute(const Call& call, TraceSink* trace) {
  try {
    return executor_->Run(call, trace);
  } catch (const Error& error) {
    GiveUp(error);
    throw;
  } catch (const std::exception&) {
    // Not an error of TIDE's: check_interrupt threw.
    GiveUp(Error(
        ErrorCode::kPeerDead,
        fmt::format("rank {} was interrupted in {}; restart the job", rank(), call.identity.text),
        {rank(), -1, "", call.program->name}));
    throw;
  }
}

}  // namespace tide::host
