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

// The first error in rank order is everyone's error.
void ThrowFirstError(const std::vector<ReceivedNotice>& notices, int rank,
                     const std::string& what) {
  for (size_t peer = 0; peer < notices.size(); ++peer) {
    const Notice& notice = notices[peer].notice;
    if (notice.error_code < 0) continue;
    throw Error(static_cast<ErrorCode>(notice.error_code),
                fmt::format("rank {}: {}", peer, notice.text),
                {rank, static_cast<int>(peer), "", what});
  }
}

void CheckSameRequest(const std::vector<ReceivedNotice>& notices, int rank,
                      const std::string& what) {
  const Notice& first = notices[0].notice;
  for (size_t peer = 1; peer < notices.size(); ++peer) {
    const Notice& other = notices[peer].notice;
    if (other.bytes == first.bytes && std::strcmp(other.text, first.text) == 0) continue;
    throw Error(
        ErrorCode::kMismatch,
        fmt::format(
            "adding a segment: rank 0 asks for {} bytes of '{}', rank {} for {} bytes of '{}'; "
            "expected the same request on every rank",
            first.bytes, first.text, peer, other.bytes, other.text),
        {rank, static_cast<int>(peer), "", what});
  }
}

}  // namespace

HostFabric::HostFabric(Bootstrap& bootstrap, const CommunicatorOptions& options)
    : sockets_(bootstrap, options.timeout), memory_limit_bytes_(options.memory_limit_bytes) {
  topology_.nodes = 1;
  topology_.local_ranks = sockets_.world();
  ConnectControlPages();
  watchdog_ = std::make_unique<Watchdog>(sockets_, pages_[static_cast<size_t>(rank())]);
  executor_ = std::make_unique<Executor>(rank(), pages_, static_cast<const AddressSpace&>(*this),
                                         *watchdog_, options.timeout, options.check_interrupt);
}

void HostFabric::ConnectControlPages() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
    internal::ThrowErrno("reading random bytes");
  const int ranks = topology_.local_ranks;
  control_ = Share(ControlPageBytes(ranks), "control page", nonce);
  for (int peer = 0; peer < ranks; ++peer) {
    pages_.emplace_back(control_->mappings[static_cast<size_t>(peer)].data(), ranks);
  }
}

std::shared_ptr<Segment> HostFabric::Share(int64_t bytes, const std::string& label,
                                           uint64_t nonce) {
  const std::string what = "sharing " + label;
  Notice mine;
  mine.bytes = bytes;
  mine.nonce = nonce;
  SetText(&mine, label);
  FileDescriptor memory;
  Mapping own;
  try {
    CheckMemory(bytes, topology_.local_ranks, memory_limit_bytes_, label);
    memory = CreateMemory(bytes, label);
    own = Mapping(memory.get(), bytes);
    if (nonce != 0) std::memcpy(own.data(), &nonce, sizeof nonce);
  } catch (const Error& error) {
    mine.error_code = static_cast<int32_t>(error.code());
    SetText(&mine, error.what());
  }
  const auto received = sockets_.Exchange(mine, memory.get(), what);
  ThrowFirstError(received, rank(), what);
  CheckSameRequest(received, rank(), what);

  auto segment = std::make_shared<Segment>();
  segment->bytes = bytes;
  Notice mapped;
  segment->mappings.resize(received.size());
  segment->mappings[static_cast<size_t>(rank())] = std::move(own);
  try {
    for (size_t peer = 0; peer < received.size(); ++peer) {
      if (static_cast<int>(peer) == rank()) continue;
      segment->mappings[peer] = Mapping(received[peer].memory.get(), bytes);
      const uint64_t theirs = received[peer].notice.nonce;
      if (theirs != 0 && std::memcmp(segment->mappings[peer].data(), &theirs, sizeof theirs) != 0) {
        throw Error(ErrorCode::kUnsupported, fmt::format("memory of rank {} is not shared", peer));
      }
    }
  } catch (const Error& error) {
    mapped.error_code = static_cast<int32_t>(error.code());
    SetText(&mapped, error.what());
  }
  // Nobody goes on before everybody has mapped: from here on peers may write.
  ThrowFirstError(sockets_.Exchange(mapped, -1, what), rank(), what);
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
  for (const ControlPage& page : pages_) page.Ring();
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
