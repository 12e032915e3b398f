// Communicator: the collectives of one process group, on one fabric.
//
//   Communicator comm(bootstrap, {});
//   int group = comm.RegisterGroup("layers.0", shapes);
//   SegmentView slot = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
//   comm.AllGather({.group = group, .shards = pointers, .shard_dtypes = dtypes, .landing =
//   {slot.id, 0}});
//
// Threads: one thread calls at a time. Every call is a collective: all ranks make the same calls in
// the same order. On the host fabric a difference is an Error(kMismatch) on all of them: a rank
// compares calls when it first waits for something that a peer has sent in this one, and what a
// peer of another call has sent by then lies in the temporary regions and is never used. On GPUs a
// difference is found beside the calls, and ends the processes with a report. A call that failed
// leaves nothing in particular in its landing or output, and poisons the communicator: later calls
// raise Error(kPoisoned).
#ifndef TIDE_COMMUNICATOR_H_
#define TIDE_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tide/bootstrap.h"
#include "tide/dtype.h"
#include "tide/layout.h"
#include "tide/plan.h"
#include "tide/program.h"

namespace tide {

class Fabric;

enum class FabricKind : uint8_t {
  kHost,  // CPU processes or threads of one machine
  kNccl,  // a GPU a process; see nccl::MakeNcclFabric
};

// Faults and delays for tests, injected into real runs. A hook that is not set costs one branch: a
// planned program, or an operation.
struct FaultInjection {
  // Changes a program before the first call that uses it.
  std::function<Program(Program)> transform;
  // Asked, on the calling thread, before every operation that could run now; false holds back its
  // queue, not the rank, and is asked again soon. May also sleep (a slow rank) or throw (a dead
  // one).
  std::function<bool(const Program&, const Operation&)> may_run;
};

// Where nothing has been measured (tide calibrate): sums keep up with the links on a quarter of an
// H200's 132 multiprocessors; on more they take more of the GPU's time for the same call.
constexpr int DefaultSumCtas(int multiprocessors) {
  return multiprocessors < 4 ? 1 : multiprocessors / 4;
}

// Bytes that communicators have reserved in segments.
using ReservedBytes = std::atomic<int64_t>;

struct CommunicatorOptions {
  FabricKind fabric = FabricKind::kHost;
  // kNccl: index of the GPU as CUDA counts. -1: the current one.
  int device = -1;
  // kNccl: path of libnccl.so.2. Empty: the one that the process has loaded.
  std::string nccl_library;
  // kNccl: thread blocks of a sum or a landing. 0: DefaultSumCtas.
  int sum_ctas = 0;
  // kNccl: the caller's cudaStream_t with work that must not be held up by waits for peers, as far
  // as they exist. The communicator's own streams are chosen so that they share no hardware queue
  // with them, once, when it is made; it waits for what they hold.
  std::vector<void*> compute_streams;
  // kNccl: asked first for the memory of a segment: all of one allocation of that library's
  // ncclMemAlloc, of exactly `bytes`, a multiple of 2 MiB, until the last share of it is gone. Null
  // leaves the segment to NCCL, an Error(kOutOfMemory) does not. Empty: NCCL alone is asked.
  std::function<std::shared_ptr<void>(int64_t bytes)> allocate_segment;
  // kNccl: called when the GPU has no memory left for a program's tables, which CUDA allocates;
  // then that is tried once more. Gives back to CUDA what an allocator keeps for later. May be
  // empty.
  std::function<void()> free_cached_memory;
  // kNccl: writes to and sums over a node through a switch, where NCCL has that. Off by default: it
  // has run on no GPU yet.
  bool multicast = false;
  // Splits the ranks, node-major, into this many virtual nodes of one machine. Must divide them.
  int nodes = 1;
  // How long a call, or a step of set-up, may take before it is an Error(kTimeout).
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  AllGatherOptions all_gather;
  // staging.slot_bytes is the upper bound of one staging slot: what does not fit goes in chunks. 0:
  // as much as one sibling contributes to one rank. Passes are ignored on one node.
  ReduceScatterOptions reduce_scatter;
  // Act as if only this much memory were available to all ranks of the machine, or, of kNccl, on
  // each GPU. 0: no such limit.
  int64_t memory_limit_bytes = 0;
  // What communicators that are given the same have reserved counts together. Null: this one alone.
  // On the host fabric that of all its ranks, so ranks that are threads need one each.
  std::shared_ptr<ReservedBytes> reserved_bytes;
  // False keeps kNodeShared segments per rank, as where the system can't share them. For tests.
  bool share_segments = true;
  // Called now and then while a call waits; may throw to give up (Ctrl-C). The others hear of it.
  std::function<void()> check_interrupt = [] {};
  FaultInjection faults;
};

// Who holds the memory of a segment.
enum class SegmentKind : uint8_t {
  kPerRank,     // every rank its own
  kNodeShared,  // the ranks of a node together: for landings, which end up equal on all of them
};

// One symmetric allocation as this rank sees it. `owner` keeps the mapping alive.
//
// Also in a node-shared segment, what a rank writes through `address` stays its own, page by page,
// and is gone after the next all-gather to those pages. A landing there starts at a page and has
// the rest of its last page to itself. A forked child sees what its parent sees, later all-gathers
// included as far as neither has written; what the child writes stays the child's.
struct SegmentView {
  int id = -1;
  SegmentKind kind = SegmentKind::kPerRank;  // kPerRank also if sharing was asked for in vain
  void* address = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<void> owner;
};

struct SegmentAddress {
  int segment = -1;
  int64_t offset = 0;
};

struct AllGatherCall {
  int group = -1;
  std::vector<const void*> shards;  // one a parameter: R_p * K_p elements
  std::vector<DType> shard_dtypes;
  SegmentAddress landing;
  // kNccl: the caller's cudaStream_t. The call follows what the stream holds now, precedes what it
  // gets next, and returns at once. Without one the call returns when it is done.
  std::optional<void*> stream = {};
  // The call follows what this stream holds now, in place of what `stream` holds. Where that holds
  // an earlier all-gather, the casts of this one run beside its transfers. Needs `stream`.
  std::optional<void*> ready_stream = {};
  // One node: the landing holds what the group's last all-gather has brought there, on all ranks,
  // and none of them has written to it; what differs from the shards by now is brought again.
  bool refresh = false;
};

struct ReduceScatterCall {
  int group = -1;
  std::vector<int> params;             // which parameters take part, in output order
  std::vector<const void*> gradients;  // one a participant: D_p * K_p elements, contiguous
  std::vector<DType> grad_dtypes;
  void* output = nullptr;  // concatenation of R_p * K_p elements a participant (paper, equation 5)
  DType output_dtype = DType::kF32;
  float scale = 1.0F;
  bool accumulate = false;
  std::optional<void*> stream = {};  // as in AllGatherCall
};

// What a group's collectives look like at most.
struct GroupNeed {
  int group = -1;
  std::vector<int> params;  // those that are reduced; none if the group is only gathered
  std::vector<DType> grad_dtypes;
  DType output_dtype = DType::kF32;
};

// Times of the last call on this rank, seconds. Wait is the part in which nothing could move.
struct CallTimes {
  double total = 0;
  double wait = 0;
};

// One executed operation; times are CLOCK_MONOTONIC seconds.
struct TraceSpan {
  std::string name;
  std::string operation;
  std::string group;
  int64_t call = 0;
  double start = 0;
  double end = 0;
};

class Communicator {
 public:
  // Collective, on the host fabric. Throws Error(kUnsupported) on every rank if the ranks do not
  // share one machine's memory.
  Communicator(Bootstrap& bootstrap, const CommunicatorOptions& options);
  // On a fabric that was made with the same options.
  Communicator(std::unique_ptr<Fabric> fabric, const CommunicatorOptions& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  const Topology& topology() const;

  // Local. Returns the id, which counts up from 0 on all ranks.
  int RegisterGroup(const std::string& name, const std::vector<ParamShape>& shapes);
  const GroupLayout& layout(int group) const;

  // Collective. Throws Error(kOutOfMemory) on every rank when it does not fit on one of them.
  SegmentView AddSegment(int64_t bytes, const std::string& label,
                         SegmentKind kind = SegmentKind::kPerRank);
  // Why kNodeShared segments are per rank here, the same on all ranks of a node; empty if they are
  // not.
  const std::string& unshared_reason() const;
  // Why differing calls and ended processes of some ranks are noticed at the deadline only; empty
  // if they are noticed at once.
  const std::string& unwatched_reason() const;
  // How many of this rank's streams share a hardware queue with compute_streams all the same: no
  // better ones were found.
  int aliased_streams() const;
  // Why a multicast is a copy to each rank of the node; empty if it is one write to all of them,
  // through a switch.
  std::string unicast_reason() const;
  // Temporary regions of this rank as they are reserved now, equal on all ranks; landings are the
  // caller's segments. (Paper, equations 10 to 12.)
  const RegionBytes& regions() const;
  // Collective. Makes room in the temporary regions for the collectives of these groups. A call of
  // a group for which there is no room makes it by itself, at the cost of a barrier.
  void Reserve(const std::vector<GroupNeed>& needs);

  void AllGather(const AllGatherCall& call);
  void ReduceScatter(const ReduceScatterCall& call);
  void Barrier();

  // The floor: the data operations of the same program with all synchronisation removed. Not
  // collective once there is room for the group (Reserve, or an earlier call).
  void UnsynchronisedAllGather(const AllGatherCall& call);
  void UnsynchronisedReduceScatter(const ReduceScatterCall& call);

  // Whether an earlier call failed: every later call raises Error(kPoisoned).
  bool poisoned() const;
  CallTimes last_call() const;
  void EnableTrace(bool enable);
  std::vector<TraceSpan> TakeTrace();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tide

#endif  // TIDE_COMMUNICATOR_H_
