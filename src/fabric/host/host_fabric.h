// The host fabric: ranks of one machine as processes or threads, memory shared through memfds.
#ifndef TIDE_FABRIC_HOST_HOST_FABRIC_H_
#define TIDE_FABRIC_HOST_HOST_FABRIC_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/host/control_page.h"
#include "fabric/host/executor.h"
#include "fabric/host/private_pages.h"
#include "fabric/host/watchdog.h"
#include "fabric/machine/memory_budget.h"
#include "fabric/machine/rendezvous.h"
#include "fabric/machine/shared_memory.h"
#include "tide/bootstrap.h"

namespace tide::host {

// One symmetric allocation. Shared by the fabric and by every tensor that lies in it, so that a
// tensor outlives the fabric.
//
// kPerRank: the mappings of this rank's and its neighbours' memory, by rank; the caller is given
// the own one.
// kNodeShared: the same, but only the first rank of a node holds memory. The fabric alone uses the
// shared mapping; the caller is given `view`, a private mapping of the same memory. Why it is safe
// that all ranks of a node write into memory that the others read from:
//   * Own parts of a landing are disjoint, and written only after every rank of the node has
//     entered the all-gather (the casts and multicasts follow all entry waits), that is, after
//     nobody reads the old contents any more. They are read after everyone's completion signal.
//   * A page that a rank has changed is that rank's own copy, so no rank sees another's change. It
//     would hide the next all-gather, too: a rank drops such copies before it enters.
//   * A page belongs to one landing (CheckRange), so dropping it loses no other landing's changes.
struct Segment {
  SegmentKind kind = SegmentKind::kPerRank;
  std::vector<machine::Mapping> mappings;
  machine::Mapping view;
  std::shared_ptr<void> reserved;  // its part of the memory budget
  int64_t bytes = 0;

  Topology topology;

  // The rank whose memory `rank` uses.
  int HolderOf(int rank) const {
    return kind == SegmentKind::kNodeShared ? topology.Rank(topology.Node(rank), 0) : rank;
  }
  const machine::Mapping& of(int rank) const {
    return mappings[static_cast<size_t>(HolderOf(rank))];
  }
};

class HostFabric final : public Fabric, private AddressSpace {
 public:
  // Collective; see Communicator.
  HostFabric(Bootstrap& bootstrap, const CommunicatorOptions& options);
  ~HostFabric() override = default;

  const Topology& topology() const override { return sockets_.topology(); }
  int rank() const override { return sockets_.rank(); }
  SegmentView AddSegment(int64_t bytes, const std::string& label, SegmentKind kind) override;
  const std::string& unshared_reason() const override { return unshared_reason_; }
  const std::string& unwatched_reason() const override { return unwatched_reason_; }
  void CheckRange(SegmentAddress address, int64_t bytes) const override;
  double Execute(const Call& call, TraceSink* trace) override;

 private:
  char* Resolve(int rank, SegmentAddress address) const override;
  // Maps what every rank, or for kNodeShared the first of every node, allocates. Errors of one rank
  // are raised on all.
  std::shared_ptr<Segment> Share(int64_t bytes, const std::string& label, uint64_t nonce,
                                 SegmentKind kind);
  void MapOthers(const std::vector<machine::ReceivedNotice>& received, Segment* segment);
  void ConnectControlPages();
  // Finds out whether all ranks can share segments, and if not, why.
  void AgreeOnSharing(bool wanted);
  void RevertChangedPages(const Call& call);
  void GiveUp(const Error& error);

  machine::PeerSockets sockets_;
  machine::MemoryBudget budget_;
  std::shared_ptr<Segment> control_;
  std::vector<ControlPage> pages_;
  std::unique_ptr<PrivatePages> private_pages_;  // null if nothing is shared
  std::string unshared_reason_;
  const std::string unwatched_reason_;  // everybody is, or there is no such fabric
  std::vector<std::shared_ptr<Segment>> segments_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_HOST_FABRIC_H_
