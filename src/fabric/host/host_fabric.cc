#include "fabric/host/host_fabric.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fabric/host/memory_limit.h"
#include "tide/error.h"

namespace tide::host {
namespace {

// All local ranks reserve at once: this rank's share of what is available must hold its own need.
// A node-shared segment is reserved once.
void CheckMemory(int64_t bytes, int local_ranks, const std::string& label, SegmentKind kind) {
  const bool once = kind == SegmentKind::kNodeShared;
  const MemoryLimit limit = ReadMemoryLimit();
  const int64_t need = once ? bytes : bytes * local_ranks;
  if (need <= limit.available_bytes) return;
  const std::string split = once
                                ? fmt::format("{} MiB, shared by {} ranks", need >> 20, local_ranks)
                                : fmt::format("{} MiB on each of {} ranks, {} MiB in all",
                                              bytes >> 20, local_ranks, need >> 20);
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("{} needs {}, but only {} MiB are available ({}). Raise that limit, use "
                          "fewer ranks or a smaller model.",
                          label, split, limit.available_bytes >> 20, limit.source));
}

const char* Name(SegmentKind kind) {
  return kind == SegmentKind::kNodeShared ? "node-shared" : "per rank";
}

void SetText(Notice* notice, const std::string& text) {
  std::strncpy(notice->text, text.c_str(), sizeof notice->text - 1);
}

// Runs one rank's part of a common step; an error goes into the notice that the others are given.
template <typename Step>
void Attempt(Notice* notice, const Step& step) {
  try {
    step();
  } catch (const Error& error) {
    notice->error_code = static_cast<int32_t>(error.code());
    SetText(notice, error.what());
  }
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
    if (other.bytes == first.bytes && other.kind == first.kind &&
        std::strcmp(other.text, first.text) == 0) {
      continue;
    }
    throw Error(ErrorCode::kMismatch,
                fmt::format("adding a segment: rank 0 asks for {} bytes of '{}' ({}), rank {} for "
                            "{} bytes of '{}' ({}); expected the same request on every rank",
                            first.bytes, first.text, Name(first.kind), peer, other.bytes,
                            other.text, Name(other.kind)),
                {rank, static_cast<int>(peer), "", what});
  }
}

}  // namespace

HostFabric::HostFabric(Bootstrap& bootstrap, const CommunicatorOptions& options)
    : sockets_(bootstrap, options.timeout) {
  topology_.nodes = 1;
  topology_.local_ranks = sockets_.world();
  ConnectControlPages();
  AgreeOnSharing(options.share_segments);
  watchdog_ = std::make_unique<Watchdog>(sockets_, pages_[static_cast<size_t>(rank())]);
  executor_ = std::make_unique<Executor>(rank(), pages_, static_cast<const AddressSpace&>(*this),
                                         *watchdog_, options.timeout, options.check_interrupt);
}

void HostFabric::ConnectControlPages() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
    internal::ThrowErrno("reading random bytes");
  const int ranks = topology_.local_ranks;
  control_ = Share(ControlPageBytes(ranks), "control page", nonce, SegmentKind::kPerRank);
  for (int peer = 0; peer < ranks; ++peer) pages_.emplace_back(control_->of(peer).data(), ranks);
}

void HostFabric::AgreeOnSharing(bool wanted) {
  Notice mine;
  if (!wanted) SetText(&mine, "switched off");
  try {
    if (wanted) private_pages_ = std::make_unique<PrivatePages>();
  } catch (const Error& error) {
    SetText(&mine, error.what());
  }
  const auto received = sockets_.Exchange(mine, -1, "agreeing on shared segments");
  for (size_t peer = 0; peer < received.size(); ++peer) {
    if (received[peer].notice.text[0] == '\0') continue;
    unshared_reason_ = fmt::format("rank {}: {}", peer, received[peer].notice.text);
    private_pages_.reset();
    return;
  }
}

std::shared_ptr<Segment> HostFabric::Share(int64_t bytes, const std::string& label, uint64_t nonce,
                                           SegmentKind kind) {
  const std::string what = "sharing " + label;
  const auto self = static_cast<size_t>(rank());
  auto segment = std::make_shared<Segment>();
  segment->kind = kind;
  segment->bytes = bytes;
  // Who allocates: everyone, or the first rank alone.
  auto& mappings = segment->mappings;
  mappings.resize(kind == SegmentKind::kNodeShared ? 1 : static_cast<size_t>(sockets_.world()));
  FileDescriptor memory;
  Notice mine;
  mine.bytes = bytes;
  mine.nonce = nonce;
  mine.kind = kind;
  SetText(&mine, label);
  Attempt(&mine, [&] {
    if (self >= mappings.size()) return;
    CheckMemory(bytes, topology_.local_ranks, label, kind);
    memory = CreateMemory(bytes, label);
    mappings[self] = Mapping(memory.get(), bytes, MapKind::kShared);
    if (nonce != 0) std::memcpy(mappings[self].data(), &nonce, sizeof nonce);
  });
  auto received = sockets_.Exchange(mine, memory.get(), what);
  ThrowFirstError(received, rank(), what);
  CheckSameRequest(received, rank(), what);

  received[self].memory = std::move(memory);
  Notice mapped;
  Attempt(&mapped, [&] {
    for (size_t peer = 0; peer < mappings.size(); ++peer) {
      if (peer == self) continue;
      mappings[peer] = Mapping(received[peer].memory.get(), bytes, MapKind::kShared);
      const uint64_t theirs = received[peer].notice.nonce;
      if (theirs != 0 && std::memcmp(mappings[peer].data(), &theirs, sizeof theirs) != 0) {
        throw Error(ErrorCode::kUnsupported, fmt::format("memory of rank {} is not shared", peer));
      }
    }
    if (kind == SegmentKind::kNodeShared) {
      segment->view = Mapping(received[0].memory.get(), bytes, MapKind::kPrivate);
    }
  });
  // Nobody goes on before everybody has mapped: from here on peers may write.
  ThrowFirstError(sockets_.Exchange(mapped, -1, what), rank(), what);
  return segment;
}

SegmentView HostFabric::AddSegment(int64_t bytes, const std::string& label, SegmentKind kind) {
  if (bytes <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("segment '{}': expected more than 0 bytes, got {}", label, bytes));
  }
  if (private_pages_ == nullptr) kind = SegmentKind::kPerRank;
  auto segment = Share(AlignUp(bytes, PageBytes()), label, 0, kind);
  segment->bytes = bytes;
  SegmentView view;
  view.id = static_cast<int>(segments_.size());
  view.kind = kind;
  view.address =
      kind == SegmentKind::kNodeShared ? segment->view.data() : segment->of(rank()).data();
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
  const Segment& segment = *segments_[static_cast<size_t>(address.segment)];
  const int64_t room = segment.bytes;
  if (address.offset < 0 || bytes > room - address.offset) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} bytes at offset {} do not fit into segment {} of {} bytes", bytes,
                            address.offset, address.segment, room));
  }
  if (segment.kind == SegmentKind::kNodeShared && address.offset % PageBytes() != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("expected an offset in the node-shared segment {} that is a multiple "
                            "of {} bytes, got {}",
                            address.segment, PageBytes(), address.offset));
  }
}

char* HostFabric::Resolve(int rank, SegmentAddress address) const {
  return segments_[static_cast<size_t>(address.segment)]->of(rank).data() + address.offset;
}

// Before this rank enters: its own changes to what the call is about to write would hide the new
// contents from it.
void HostFabric::RevertChangedPages(const Call& call) {
  for (size_t i = 0; i < call.binding->buffers.size(); ++i) {
    const SegmentAddress& at = call.binding->buffers[i].symmetric;
    if (at.segment < 0) continue;
    const Segment& segment = *segments_[static_cast<size_t>(at.segment)];
    if (segment.kind != SegmentKind::kNodeShared) continue;
    private_pages_->Revert(segment.view.data() + at.offset,
                           AlignUp(call.program->buffers[i].bytes, PageBytes()));
  }
}

// The others wait for this rank: tell them why it stops.
void HostFabric::GiveUp(const Error& error) {
  pages_[static_cast<size_t>(rank())].Fail(error);
  for (const ControlPage& page : pages_) page.Ring();
}

double HostFabric::Execute(const Call& call, TraceSink* trace) {
  try {
    RevertChangedPages(call);
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
