// Symmetric memory: NCCL allocations that every rank of the node reaches through pointers and every
// rank of the rail through puts.
//
// One window an allocation, at offset 0, a multiple of 2 MiB (other sizes halve the speed of peer
// copies). Registered in the parent communicator, which gives the peer pointers, and in the rail of
// each lane that puts. Segments are only added.
#ifndef TIDE_FABRIC_NCCL_SEGMENTS_H_
#define TIDE_FABRIC_NCCL_SEGMENTS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fabric/machine/memory_budget.h"
#include "fabric/nccl/device.h"
#include "tide/bootstrap.h"
#include "tide/communicator.h"
#include "tide/program.h"

namespace tide::nccl {

// The communicators of a rank. Rails are there if there are several nodes: rank n of a rail is the
// rank of node n with the same local index.
struct Communicators {
  std::unique_ptr<NcclCommunicator> parent;
  std::array<std::unique_ptr<NcclCommunicator>, kLanes> rails;

  NcclCommunicator* rail(Lane lane) const { return rails[static_cast<size_t>(lane)].get(); }
};

// Gives a whole NCCL allocation of so many bytes, a multiple of 2 MiB, and frees it with the last
// share. Tensors have shares, too, and may outlive the communicators. Throws Error(kOutOfMemory).
using AllocateSegment = std::function<std::shared_ptr<void>(int64_t bytes)>;

class Segments {
 public:
  // References outlive the segments.
  Segments(AllocateSegment allocate, machine::MemoryBudget budget, Device& device,
           const Communicators& communicators, Bootstrap& bootstrap, const Topology& topology);
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  // Collective. The memory lives as long as the view's owner.
  SegmentView Add(int64_t bytes, const std::string& label);
  void CheckRange(SegmentAddress address, int64_t bytes) const;
  // Collective. From here on, and back to the first, segments have multicast addresses. Throws
  // Error(kUnsupported) on a rank that gets none; multicast() then stays false there.
  void FindMulticast();
  bool multicast() const { return multicast_; }

  // Throws Error(kUnsupported) for memory of a rank that pointers don't reach.
  char* Resolve(int rank, SegmentAddress address) const;
  char* ResolveMulticast(SegmentAddress address) const;
  Window RailWindow(Lane lane, int segment) const {
    return segments_[static_cast<size_t>(segment)].rails[static_cast<size_t>(lane)];
  }

 private:
  struct Segment {
    std::shared_ptr<void> memory;
    int64_t bytes = 0;  // that the caller asked for
    Window parent = nullptr;
    std::array<Window, kLanes> rails{};
    std::vector<char*> peers;   // by rank; null if out of reach
    char* multicast = nullptr;  // all ranks of the node at once
  };
  std::shared_ptr<void> Allocate(int64_t bytes, const std::string& label);
  void Register(Segment* segment, const std::string& label);
  void Deregister(const Segment& segment);
  void FindPeers(Segment* segment, const std::string& label) const;
  void FindMulticast(Segment* segment) const;

  const AllocateSegment allocate_;
  machine::MemoryBudget budget_;
  Device& device_;
  const Communicators& communicators_;
  Bootstrap& bootstrap_;
  const Topology topology_;
  const int rank_;
  std::vector<Segment> segments_;
  bool multicast_ = false;
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_SEGMENTS_H_
