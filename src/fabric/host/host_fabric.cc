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

// What all ranks reserve at once for a segment; a node-shared one is reserved once a node.
struct Need {
  int64_t bytes = 0;
  std::string text;
};

Need NeedOf(int64_t bytes, const Topology& topology, const std::string& label, SegmentKind kind) {
  const bool shared = kind == SegmentKind::kNodeShared;
  const int64_t all = bytes * (shared ? topology.nodes : topology.Ranks());
  const std::string split =
      shared ? fmt::format("{}, shared by {} ranks", FormatBytes(bytes), topology.local_ranks)
             : fmt::format("{} on each of {} ranks", FormatBytes(bytes), topology.Ranks());
  return {all, fmt::format("{} needs {}, {} in all", label, split, FormatBytes(all))};
}

// What was reserved before is no longer available here.
void CheckMemory(const Need& need) {
  const MemoryLimit limit = ReadMemoryLimit();
  if (need.bytes <= limit.available_bytes) return;
  machine::RefuseMemory(need.text, limit.available_bytes, limit.source);
}

const char* Name(SegmentKind kind) {
  return kind == SegmentKind::kNodeShared ? "node-shared" : "per rank";
}

// An error unless all neighbours ask for the same; null if they do.
std::unique_ptr<Error> CompareRequests(const std::vector<machine::ReceivedNotice>& notices,
                                       int rank, const std::string& what) {
  const machine::Notice& ours = notices[static_cast<size_t>(rank)].notice;
  for (const machine::ReceivedNotice& entry : notices) {
    const machine::Notice& other = entry.notice;
    if (other.rank < 0 || other.error_code >= 0) continue;
    if (other.bytes == ours.bytes && other.kind == ours.kind &&
        std::strcmp(other.text, ours.text) == 0) {
      continue;
    }
    return std::make_unique<Error>(
        ErrorCode::kMismatch,
        fmt::format(
            "adding a segment: rank {} asks for {} bytes of '{}' ({}), rank {} for {} bytes "
            "of '{}' ({}); expected the same request on every rank",
            rank, ours.bytes, ours.text, Name(ours.kind), other.rank, other.bytes, other.text,
            Name(other.kind)),
        ErrorContext{rank, other.rank, "", what});
  }
  return nullptr;
}

}  // namespace

HostFabric::HostFabric(Bootstrap& bootstrap, const CommunicatorOptions& options)
    : sockets_(bootstrap, SplitIntoNodes(bootstrap.world(), options.nodes), options.timeout,
               machine::Reach::kNeighbours),
      budget_(options) {
  ConnectControlPages();
  AgreeOnSharing(options.share_segments);
  watchdog_ = std::make_unique<Watchdog>(sockets_, pages_[static_cast<size_t>(rank())]);
  executor_ = std::make_unique<Executor>(
      rank(), topology(), pages_, static_cast<const AddressSpace&>(*this), *watchdog_,
      options.timeout, options.check_interrupt, options.faults.may_run);
}

void HostFabric::ConnectControlPages() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
    internal::ThrowErrno("reading random bytes");
  control_ = Share(ControlPageBytes(topology()), "control page", nonce, SegmentKind::kPerRank);
  for (int peer = 0; peer < sockets_.world(); ++peer) {
    char* memory = control_->of(peer).data();
    pages_.push_back(memory != nullptr ? ControlPage(memory, topology(), peer) : ControlPage());
  }
}

void HostFabric::AgreeOnSharing(bool wanted) {
  std::unique_ptr<Error> error;
  if (!wanted) error = std::make_unique<Error>(ErrorCode::kUnsupported, "switched off");
  try {
    if (wanted) private_pages_ = std::make_unique<PrivatePages>();
  } catch (const Error& failure) {
    error = std::make_unique<Error>(ErrorCode::kUnsupported, failure.what());
  }
  try {
    sockets_.Agree(error.get(), "agreeing on shared segments");
  } catch (const Error& first) {
    if (first.code() != ErrorCode::kUnsupported) throw;
    unshared_reason_ = first.what();
    private_pages_.reset();
  }
}

std::shared_ptr<Segment> HostFabric::Share(int64_t bytes, const std::string& label, uint64_t nonce,
                                           SegmentKind kind) {
  const std::string what = "sharing " + label;
  const auto self = static_cast<size_t>(rank());
  auto segment = std::make_shared<Segment>();
  segment->kind = kind;
  segment->bytes = bytes;
  segment->topology = topology();
  segment->mappings.resize(static_cast<size_t>(sockets_.world()));
  machine::Notice mine;
  mine.bytes = bytes;
  mine.nonce = nonce;
  mine.kind = kind;
  mine.SetText(label);
  std::unique_ptr<Error> error;
  machine::FileDescriptor memory;
  const bool holds = segment->HolderOf(rank()) == rank();
  try {
    const Need need = NeedOf(bytes, topology(), label, kind);
    segment->reserved = budget_.Take(need.bytes, need.text);  // the same on ranks that hold none
    if (holds) CheckMemory(need);
  } catch (const Error& failure) {
    error = std::make_unique<Error>(failure);
  }
  // Nobody takes memory before everybody has looked how much there is for all.
  sockets_.Agree(error.get(), what);
  try {
    if (holds) {
      memory = machine::CreateMemory(bytes, label);
      segment->mappings[self] = machine::Mapping(memory.get(), bytes, machine::MapKind::kShared);
      if (nonce != 0) std::memcpy(segment->mappings[self].data(), &nonce, sizeof nonce);
    }
  } catch (const Error& failure) {
    error = std::make_unique<Error>(failure);
    mine.error_code = static_cast<int32_t>(failure.code());
  }
  auto received = sockets_.Exchange(mine, memory.get(), what);
  if (!error) error = CompareRequests(received, rank(), what);
  received[self].memory = std::move(memory);
  try {
    if (!error) MapOthers(received, segment.get());
  } catch (const Error& failure) {
    error = std::make_unique<Error>(failure);
  }
  // Nobody goes on before everybody has mapped: from here on peers may write.
  sockets_.Agree(error.get(), what);
  return segment;
}

// A neighbour that failed gave no memory: it raises its error on all ranks.
void HostFabric::MapOthers(const std::vector<machine::ReceivedNotice>& received, Segment* segment) {
  for (size_t peer = 0; peer < received.size(); ++peer) {
    const machine::ReceivedNotice& entry = received[peer];
    if (!sockets_.IsNeighbour(static_cast<int>(peer)) || !entry.memory.valid()) continue;
    segment->mappings[peer] =
        machine::Mapping(entry.memory.get(), segment->bytes, machine::MapKind::kShared);
    const uint64_t theirs = entry.notice.nonce;
    if (theirs != 0 && std::memcmp(segment->mappings[peer].data(), &theirs, sizeof theirs) != 0) {
      throw Error(ErrorCode::kUnsupported, fmt::format("memory of rank {} is not shared", peer));
    }
  }
  if (segment->kind != SegmentKind::kNodeShared) return;
  const auto holder = static_cast<size_t>(segment->HolderOf(rank()));
  if (received[holder].memory.valid()) {
    segment->view =
        machine::Mapping(received[holder].memory.get(), segment->bytes, machine::MapKind::kPrivate);
  }
}

SegmentView HostFabric::AddSegment(int64_t bytes, const std::string& label, SegmentKind kind) {
  if (bytes <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("segment '{}': expected more than 0 bytes, got {}", label, bytes));
  }
  if (private_pages_ == nullptr) kind = SegmentKind::kPerRank;
  auto segment = Share(AlignUp(bytes, machine::PageBytes()), label, 0, kind);
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
  if (segment.kind == SegmentKind::kNodeShared && address.offset % machine::PageBytes() != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("expected an offset in the node-shared segment {} that is a multiple "
                            "of {} bytes, got {}",
                            address.segment, machine::PageBytes(), address.offset));
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
                           AlignUp(call.program->buffers[i].bytes, machine::PageBytes()));
  }
}

// The others wait for this rank: tell them why it stops.
void HostFabric::GiveUp(const Error& error) {
  pages_[static_cast<size_t>(rank())].header().last_words.Leave(error);
  for (const ControlPage& page : pages_) {
    if (page.valid()) page.Ring();
  }
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
