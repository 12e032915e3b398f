#include "fabric/nccl/segments.h"

#include <fmt/format.h>

#include <utility>

#include "fabric/nccl/agreement.h"
#include "layout/format_bytes.h"
#include "tide/error.h"
#include "tide/layout.h"

namespace tide::nccl {
namespace {

constexpr int64_t kSegmentBytes = int64_t{2} << 20;

}  // namespace

Segments::Segments(AllocateSegment allocate, machine::MemoryBudget budget, Device& device,
                   const Communicators& communicators, Bootstrap& bootstrap,
                   const Topology& topology)
    : allocate_(std::move(allocate)),
      budget_(std::move(budget)),
      device_(device),
      communicators_(communicators),
      bootstrap_(bootstrap),
      topology_(topology),
      rank_(bootstrap.rank()) {}

Segments::~Segments() {
  for (const Segment& segment : segments_) Deregister(segment);
}

void Segments::Deregister(const Segment& segment) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Window window = segment.rails[static_cast<size_t>(lane)];
    if (window != nullptr) communicators_.rail(static_cast<Lane>(lane))->Deregister(window);
  }
  if (segment.parent != nullptr) communicators_.parent->Deregister(segment.parent);
}

std::shared_ptr<void> Segments::Allocate(int64_t bytes, const std::string& label) {
  auto reserved = budget_.Take(bytes, fmt::format("'{}' needs {}", label, FormatBytes(bytes)));
  std::shared_ptr<void> memory = allocate_(bytes);
  void* const address = memory.get();
  return {address, [memory = std::move(memory), reserved = std::move(reserved)](void*) mutable {
            memory.reset();
            reserved.reset();
          }};
}

SegmentView Segments::Add(int64_t bytes, const std::string& label) {
  if (bytes <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("segment '{}': expected more than 0 bytes, got {}", label, bytes));
  }
  Segment segment;
  segment.bytes = bytes;
  const int64_t rounded = AlignUp(bytes, kSegmentBytes);
  TakeStep(bootstrap_, "adding segment '" + label + "'",
           fmt::format("{} bytes of '{}'", bytes, label), [&] {
             segment.memory = Allocate(rounded, label);
             device_.Clear(segment.memory.get(), rounded);
           });
  try {
    Register(&segment, label);
  } catch (...) {
    Deregister(segment);  // before its memory goes
    throw;
  }
  SegmentView view;
  view.id = static_cast<int>(segments_.size());
  view.address = segment.memory.get();
  view.bytes = bytes;
  view.owner = segment.memory;
  segments_.push_back(std::move(segment));
  return view;
}

void Segments::Register(Segment* segment, const std::string& label) {
  void* address = segment->memory.get();
  const int64_t bytes = AlignUp(segment->bytes, kSegmentBytes);
  const std::string what = "registering segment '" + label + "'";
  // A step each: a rank that fails in one would leave the others waiting for it in the next.
  TakeStep(bootstrap_, what, "",
           [&] { segment->parent = communicators_.parent->Register(address, bytes); });
  for (const Lane lane : {Lane::kControl, Lane::kAllGather, Lane::kReduceScatter}) {
    NcclCommunicator* rail = communicators_.rail(lane);
    // The control lane moves no data.
    if (rail == nullptr || lane == Lane::kControl) continue;
    TakeStep(bootstrap_, what, "",
             [&] { segment->rails[static_cast<size_t>(lane)] = rail->Register(address, bytes); });
  }
  TakeStep(bootstrap_, what, "", [&] { FindPeers(segment, label); });
  if (multicast_) TakeStep(bootstrap_, what, "", [&] { FindMulticast(segment); });
}

void Segments::FindPeers(Segment* segment, const std::string& label) const {
  const int node = topology_.Node(rank_);
  for (int peer = 0; peer < topology_.Ranks(); ++peer) {
    void* pointer = peer == rank_ ? segment->memory.get()
                                  : communicators_.parent->PeerPointer(segment->parent, peer);
    if (pointer == nullptr && topology_.Node(peer) == node) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("segment '{}': the memory of rank {} can't be reached from rank {} of "
                      "the same node; expected peer access between all GPUs of a node (see "
                      "`nvidia-smi topo -p2p rw`)",
                      label, peer, rank_));
    }
    segment->peers.push_back(static_cast<char*>(pointer));
  }
}

void Segments::FindMulticast(Segment* segment) const {
  segment->multicast = static_cast<char*>(communicators_.parent->MulticastPointer(segment->parent));
  if (segment->multicast == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                "NCCL gives a segment no multicast address; NCCL_NVLS_ENABLE=0 does without");
  }
}

void Segments::FindMulticast() {
  for (Segment& segment : segments_) FindMulticast(&segment);
  multicast_ = true;
}

void Segments::CheckRange(SegmentAddress address, int64_t bytes) const {
  if (address.segment < 0 || address.segment >= static_cast<int>(segments_.size())) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("expected a segment in [0, {}), got {}",
                                                         segments_.size(), address.segment));
  }
  const int64_t room = segments_[static_cast<size_t>(address.segment)].bytes;
  if (address.offset < 0 || bytes > room - address.offset) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} bytes at offset {} do not fit into segment {} of {} bytes", bytes,
                            address.offset, address.segment, room));
  }
}

char* Segments::Resolve(int rank, SegmentAddress address) const {
  char* start = segments_[static_cast<size_t>(address.segment)].peers[static_cast<size_t>(rank)];
  if (start == nullptr) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("memory of rank {} on another node can't be reached through pointers", rank),
        {rank_, rank, "", ""});
  }
  return start + address.offset;
}

char* Segments::ResolveMulticast(SegmentAddress address) const {
  char* start = segments_[static_cast<size_t>(address.segment)].multicast;
  TIDE_CHECK(start != nullptr);
  return start + address.offset;
}

}  // namespace tide::nccl
