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
#include "fabric/host/rendezvous.h"
#include "fabric/host/segment.h"
#include "fabric/host/watchdog.h"
#include "tide/bootstrap.h"

namespace tide::host {

// One symmetric allocation: the mappings of this rank's and its neighbours' memory, by rank. Shared
// by the fabric and by every tensor that lies in it, so that a tensor outlives the fabric.
struct Segment {
  std::vector<Mapping> mappings;
  int64_t bytes = 0;
};

class HostFabric final : public Fabric, private AddressSpace {
 public:
  // Collective; see Communicator.
  HostFabric(Bootstrap& bootstrap, const CommunicatorOptions& options);
  ~HostFabric() override = default;

  const Topology& topology() const override { return sockets_.topology(); }
  int rank() const override { return sockets_.rank(); }
  SegmentView AddSegment(int64_t bytes, const std::string& label) override;
  void CheckRange(SegmentAddress address, int64_t bytes) const override;
  double Execute(const Call& call, TraceSink* trace) override;

 private:
  char* Resolve(int rank, SegmentAddress address) const override;
  // Allocates here and maps what every rank allocated. Errors of one rank are raised on all.
  std::shared_ptr<Segment> Share(int64_t bytes, const std::string& label, uint64_t nonce);
  void ConnectControlPages();
  void GiveUp(const Error& error);

  PeerSockets sockets_;
  int64_t memory_limit_bytes_;  // 0: none
  std::shared_ptr<Segment> control_;
  std::vector<ControlPage> pages_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_HOST_FABRIC_H_
