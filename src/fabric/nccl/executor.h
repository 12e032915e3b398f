// Issues the commands of a lowered program to the streams of this rank and returns; nothing waits
// for the device.
#ifndef TIDE_FABRIC_NCCL_EXECUTOR_H_
#define TIDE_FABRIC_NCCL_EXECUTOR_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/nccl/counters.h"
#include "fabric/nccl/device.h"
#include "fabric/nccl/lowering.h"
#include "fabric/nccl/segments.h"
#include "fabric/nccl/watchdog.h"

namespace tide::nccl {

// A program, lowered, with what it needs on the device. Shared with the watchdog.
struct LoweredProgram final : Prepared {
  Lowered lowered;
  Lane lane = Lane::kControl;
  std::vector<Stream> streams;
  std::vector<std::unique_ptr<Kernel>> sums;
  std::vector<std::unique_ptr<Kernel>> zeros;
};

class Executor {
 public:
  // All references outlive the executor. `counters` is the start of the own counters' segment.
  Executor(int rank, const Topology& topology, Device& device, const Communicators& communicators,
           const Segments& segments, int counter_segment, Counters& counters, Watchdog& watchdog);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Streams that programs get before new ones are made; destroyed with the executor.
  void Adopt(std::vector<Stream> streams) { spare_ = std::move(streams); }
  std::shared_ptr<LoweredProgram> Prepare(const Program& program);
  // Enqueues the call: after what the caller's stream holds now, and before what it gets next.
  // Without a stream nothing orders it. Returns the event that stands for its end.
  EventHandle Run(const Call& call, const std::shared_ptr<LoweredProgram>& program);
  // Keeps everything that the programs of this rank have on the device to the end of the process.
  void KeepPrograms();
  // One event a stream, reached when everything that was enqueued so far has run.
  std::vector<EventHandle> MarkEnds();

 private:
  // The streams and events of a lane, by name and number; shared by its programs.
  struct LaneState {
    std::map<std::string, Stream> streams;
    std::vector<EventHandle> events;
  };

  Stream TakeStream();
  std::unique_ptr<Kernel> MakeKernel(const LoweredSum& sum);
  LaneState& lane(Lane lane) { return lanes_[static_cast<size_t>(lane)]; }
  void ResolveBases(const Call& call, const Lowered& lowered);
  void Issue(const Call& call, LoweredProgram& program, const Command& command);
  void IssueCopies(const Lowered& lowered, const Command& command, Stream stream);
  void IssuePitched(const Lowered& lowered, const Command& command, Stream stream);
  void IssueMemoryOps(Lane lane, const Lowered& lowered, const Command& command, Stream stream);
  void IssueSends(const Call& call, const Lowered& lowered, const Command& command, Stream stream);
  void IssueRailWaits(Lane lane, const Lowered& lowered, const Command& command, Stream stream);
  EventHandle EventOf(int event) const;
  void* At(const Place& place) const {
    return bases_[static_cast<size_t>(place.base)] + place.offset;
  }

  const int rank_;
  const Topology topology_;
  Device& device_;
  const Communicators& communicators_;
  const Segments& segments_;
  const int counter_segment_;
  Counters& counters_;
  Watchdog& watchdog_;
  std::array<LaneState, kLanes> lanes_;
  std::vector<Stream> spare_;
  std::vector<EventHandle> ends_;
  std::vector<std::weak_ptr<LoweredProgram>> programs_;

  // Of the call under way; kept to reuse the memory.
  std::vector<EventHandle>* events_ = nullptr;
  std::vector<char*> bases_;
  std::vector<CopyArgs> copies_;
  std::vector<PitchedArgs> pitched_;
  std::vector<MemoryOp> memory_ops_;
  std::vector<Transfer> transfers_;
  std::vector<SignalWait> rail_waits_;
  WatchedCall* watched_ = nullptr;
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_EXECUTOR_H_
