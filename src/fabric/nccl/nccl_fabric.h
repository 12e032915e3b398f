// The fabric of GPUs: copy engines inside a node, NCCL's one-sided operations between nodes.
//
// A rank is a process with one GPU. Ranks may share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1), and nodes
// may be virtual. Execute enqueues; with a stream in the call nothing waits for the device.
#ifndef TIDE_FABRIC_NCCL_NCCL_FABRIC_H_
#define TIDE_FABRIC_NCCL_NCCL_FABRIC_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "fabric/fabric.h"
#include "fabric/nccl/counters.h"
#include "fabric/nccl/device.h"
#include "fabric/nccl/executor.h"
#include "fabric/nccl/peers.h"
#include "fabric/nccl/segments.h"
#include "fabric/nccl/watchdog.h"
#include "tide/bootstrap.h"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide::nccl {

// What the fabric stands on. Making it may fail with the reason why there is no such fabric here.
struct Parts {
  std::unique_ptr<Device> device;
  std::shared_ptr<NcclLibrary> library;
};
using MakeParts = std::function<Parts()>;

class NcclFabric final : public Fabric {
 public:
  // Collective. The bootstrap outlives the fabric: segments are agreed on through it. Throws
  // Error(kUnsupported) on all ranks if a capability is missing everywhere, Error(kMismatch) if it
  // is missing on some ranks. `expired` is the watchdog's, empty for its default.
  NcclFabric(Bootstrap& bootstrap, const CommunicatorOptions& options, const MakeParts& make_parts,
             std::function<void(const std::string&)> expired = {});
  ~NcclFabric() override;

  const Topology& topology() const override { return topology_; }
  int rank() const override { return bootstrap_.rank(); }
  SegmentView AddSegment(int64_t bytes, const std::string& label, SegmentKind kind) override;
  const std::string& unshared_reason() const override { return unshared_reason_; }
  const std::string& unwatched_reason() const override { return peers_->unwatched_reason(); }
  void CheckRange(SegmentAddress address, int64_t bytes) const override;
  std::shared_ptr<Prepared> Prepare(const Program& program) override;
  double Execute(const Call& call, TraceSink* trace) override;
  int aliased_streams() const override { return aliased_streams_; }
  std::string unicast_reason() const override { return unicast_reason_; }

 private:
  void Connect();
  void CheckProperties() const;
  // Throws Error(kUnsupported) if NCCL or the topology has no multicast for the ranks of a node.
  void CheckMulticast() const;
  void WarmUp();
  void ChooseStreams();
  // Throws Error(kTimeout) if the event is not reached in time.
  void WaitFor(EventHandle event, const char* what, std::chrono::nanoseconds timeout);
  void RunBarrier(Lane lane, std::chrono::nanoseconds timeout);
  // Ends together with the other ranks: nobody uses this rank's memory any more.
  void Leave();
  void Abandon();
  // A call has failed: the streams may hold anything, and the others may wait for this rank.
  void GiveUp(const Error& error);

  Bootstrap& bootstrap_;
  const CommunicatorOptions options_;
  const Topology topology_;
  const std::string unshared_reason_ = "GPUs keep a landing each";
  Parts parts_;
  std::unique_ptr<Peers> peers_;
  Communicators communicators_;
  std::unique_ptr<Counters> counters_;
  std::unique_ptr<Segments> segments_;
  SegmentView counter_memory_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<Executor> executor_;
  int aliased_streams_ = 0;
  std::string unicast_reason_;
  bool failed_ = false;
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_NCCL_FABRIC_H_
