// Translates a program into commands for streams, once a program.
//
// Pure: no device. Commands are in the planner's enqueue order, which is free of deadlock even in
// one FIFO; only operations that follow each other on one queue are merged:
//   pieces of a copy        one batch, and one of pitched pieces
//   multicasts              one batch of pushes, the own copy beside it on a stream of its own; or
//                           one batch of copies to the multicast address
//   refreshes               one kernel
//   puts, signals to nodes  one group, so that all transfers of a round are under way together
//   signals, waits in node  one batch of memory operations
// Addresses are resolved at each call: a Place counts from a base, and there are few bases.
#ifndef TIDE_FABRIC_NCCL_LOWERING_H_
#define TIDE_FABRIC_NCCL_LOWERING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "tide/program.h"

namespace tide::nccl {

// How a rank reaches all ranks of its node: one after the other through peer pointers, or at once
// through the multicast address of a segment.
enum class Reach : uint8_t { kUnicast, kMulticast };

// In place of a rank: all ranks of the node, through the multicast address.
inline constexpr int kWholeNode = -1;

// The start of a buffer in the memory of a rank. The first bases are the own buffers, in order.
struct Base {
  int buffer = 0;
  int rank = 0;  // or kWholeNode
};

using Place = kernels::cuda::Operand;  // base, offset

enum class CommandKind : uint8_t {
  kCopies,     // range of Lowered::copies
  kPitched,    // range of Lowered::pitched
  kMemoryOps,  // range of Lowered::memory_ops
  kSends,      // range of Lowered::sends
  kRailWaits,  // range of Lowered::rail_waits
  kRecord,     // event `first`
  kAwait,      // event `first`
  kSum,        // Lowered::sums[first]
  kZero,       // Lowered::zeros[first]
};

struct Command {
  CommandKind kind = CommandKind::kCopies;
  int stream = 0;  // index into Lowered::streams
  int first = 0;
  int count = 1;
};

struct LoweredCopy {
  Place dst;
  Place src;
  int64_t bytes = 0;
};

struct LoweredPitched {
  Place dst;
  Place src;
  int64_t row_bytes = 0;
  int64_t rows = 0;
  int64_t dst_pitch = 0;
  int64_t src_pitch = 0;
};

// Raises or awaits a counter. Waits: an own counter, `value` above its base. Signals: the counter
// of `peer` that this rank produces.
struct LoweredSync {
  bool wait = false;
  Counter counter;
  int peer = 0;
  int64_t value = 0;
};

// `bytes` from the place to the same-rail rank `peer`, then one increment of `counter` there.
struct LoweredSend {
  int peer = 0;
  int dst_buffer = 0;  // of the program
  int64_t dst_offset = 0;
  Place src;
  int64_t bytes = 0;  // 0: the signal alone
  Counter counter;
};

enum class SumKind : uint8_t {
  kSum,
  kCast,       // one source each
  kRefresh,    // one source each; writes dst and copies where dst differs from it
  kMulticast,  // one source each, a multicast address: the switch adds what all ranks have there
};

struct LoweredSum {
  std::vector<kernels::cuda::SumItem> items;
  SumKind kind = SumKind::kSum;
  bool scaled = false;
  bool accumulate = false;
};

// Numbers of the caller's events; the program's local ones and those of the lowering follow.
enum : int { kReadyEvent, kGateEvent, kReadDoneEvent, kDoneEvent, kFirstLocalEvent };

// Signals of NCCL are named by a signal index and a context. Kinds that travel between nodes have
// a fixed signal index; a counter's index is the context (kHead), the part and the context
// (kArrived) or a part of its own (kCredit).
struct RailSignal {
  int signal = 0;
  int context = 0;
};
inline constexpr int kRailSignals = 9;
// TIDE_CHECKs that the kind travels between nodes.
RailSignal RailSignalOf(const Counter& counter);

struct Lowered {
  // Queues of one name and lane go on from call to call, so they are one stream.
  std::vector<std::string> streams;
  std::vector<Base> bases;
  std::vector<Command> commands;
  std::vector<LoweredCopy> copies;
  std::vector<LoweredPitched> pitched;
  std::vector<LoweredSync> memory_ops;
  std::vector<LoweredSend> sends;
  std::vector<LoweredSync> rail_waits;
  std::vector<LoweredSum> sums;
  std::vector<std::vector<kernels::cuda::ZeroItem>> zeros;
  int events = kFirstLocalEvent;
  bool records_read_done = false;
};

Lowered Lower(const Program& program, Reach reach = Reach::kUnicast);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_LOWERING_H_
