// A collective as data: in-order queues of plain operations on symbolic buffers (docs/design.md).
//
// A planner makes one Program for every rank. Verifier, simulator and fabrics consume programs and
// know no collective. Everything is relative: buffers are bound to addresses and counters to bases
// at each call, so one program serves every call with the same key.
#ifndef TIDE_PROGRAM_H_
#define TIDE_PROGRAM_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tide/dtype.h"
#include "tide/layout.h"

namespace tide {

enum class BufferKind : uint8_t {
  kShard,        // index = parameter; own memory; the padded shard
  kResident,     // symmetric; the group's shards, packed (paper, section 3.1)
  kLanding,      // symmetric; one slot of the group's unsharded parameters
  kStage,        // symmetric; receive stage of the all-gather: packed shards of other nodes
  kGradient,     // index = position among the participating parameters; own memory
  kStaging,      // index = (filling rank - owner) mod L, at least 1; symmetric
  kOutbox,       // index = bank; symmetric, because it is the source of puts
  kSpare,        // index = bank; own-node partials
  kInbox,        // index = generation; symmetric
  kAccumulator,  // own memory; fp32 output of several waves when the output is narrower
  kOutput,       // own memory; the reduce-scatter's result
};

// A symbolic buffer. Symmetric buffers lie in segments and can be written by peers.
struct Buffer {
  BufferKind kind = BufferKind::kShard;
  int index = 0;
  int64_t bytes = 0;

  bool symmetric() const;
};

// A place in a buffer: which one (index into Program::buffers) and the byte offset.
struct Ref {
  int buffer = 0;
  int64_t offset = 0;
};

// Bytes to move: `rows` runs of `row_bytes`, consecutive runs `pitch` bytes apart. Contiguous is
// one row.
struct Piece {
  Ref dst;
  Ref src;
  int64_t row_bytes = 0;
  int64_t rows = 1;
  int64_t dst_pitch = 0;
  int64_t src_pitch = 0;
};

// Elements to convert, round to nearest even.
struct CastPiece {
  Ref dst;
  Ref src;
  int64_t elems = 0;
  DType dst_dtype = DType::kF32;
  DType src_dtype = DType::kF32;
};

// dst = [dst +] [scale *] (fp32 sum of sources in the listed order); the scale belongs to the call.
struct SumPiece {
  Ref dst;
  std::vector<Ref> sources;
  int64_t elems = 0;
  DType dst_dtype = DType::kF32;
  DType src_dtype = DType::kF32;
};

// Monotonic counters have one producing rank and queue and one waiting queue. A counter lives on
// the waiting rank, belongs to the program's lane and is named (kind, producer, index). The
// producer may be the waiting rank itself: that orders its queues across calls.
enum class CounterKind : uint8_t {
  kEntry,       // the producer has entered the call: its landing may be written
  kLanded,      // the producer's part of the landing has landed here
  kHead,        // the producer's next head piece has arrived here; index = context
  kArrived,     // the producer's next piece has arrived here; index = part * kMaxContexts +
                // context, part = group of slots (all-gather) or generation (reduce-scatter)
  kConfirmed,   // the producer has the heads of the round before the one that this rank sends it
  kCredit,      // the producer's receive area may be written; reduce-scatter: index = generation
  kFilled,      // the producer has filled the next staging slot here
  kReleased,    // the producer has read the next staging slot that this rank filled there
  kPlaced,      // the producer's inbox blocks of the next wave are complete; index = generation
  kReduced,     // the producer has landed the next wave; index = generation
  kOutboxFree,  // own: the next outbox block has been sent; index = bank
  kSpareFree,   // own: the next spare block has been landed; index = bank
};
inline constexpr int kCounterKinds = 12;
// Contexts of a rail that pieces are striped over. Each counts for itself: pieces of one context
// arrive in order, so its k-th increment is that of its k-th piece.
inline constexpr int kMaxContexts = 4;
// Indices of each kind, in the order of CounterKind.
inline constexpr int kCounterIndices[kCounterKinds] = {
    1, 1, kMaxContexts, 4 * kMaxContexts, 1, 2, 1, 1, 2, 2, 2, 2};
inline constexpr int kMaxCounterIndices = 4 * kMaxContexts;
constexpr int CounterIndices(CounterKind kind) { return kCounterIndices[static_cast<int>(kind)]; }

struct Counter {
  CounterKind kind = CounterKind::kEntry;
  int producer = 0;  // rank
  int index = 0;     // below CounterIndices(kind)

  bool operator==(const Counter&) const = default;
};

// One transfer of a put: contiguous bytes, then one increment of (signal, sender, signal_index) on
// the target; the index names the context, too. Pieces of one context to one peer arrive in order;
// other pieces in any order.
struct PutPiece {
  Ref dst;
  Ref src;
  int64_t bytes = 0;
  int context = 0;
  CounterKind signal = CounterKind::kArrived;
  int signal_index = 0;
};

// The cross-node sum of one wave (paper, section 4.2): dst = [dst +] scale * (fp32 sum of the block
// at the same offset on the local ranks `locals`, in this order). A switch reduces over all local
// ranks: blocks of ranks that are not listed are added last and must be zero.
struct LandPiece {
  Ref dst;    // own memory, fp32
  Ref block;  // symmetric, fp32
  std::vector<int> locals;
  int64_t elems = 0;
  DType dst_dtype = DType::kF32;
};

enum class OpKind : uint8_t {
  kCopy,       // pieces to the rank `peer` of the same node (or itself)
  kMulticast,  // pieces to every rank of the node; see Span
  kPut,        // puts to the rank `peer` of the same local index on another node
  kCast,       // casts, own memory
  kRefresh,    // casts, or copies of equal dtypes, to every rank of the node; writes nothing where
               // the own dst, and so that of every rank, holds the result already
  kSum,        // sums, own memory
  kLand,       // lands, from all ranks of the node
  kZero,       // clears the dst of each piece, own memory
  kSignal,     // adds one to `counter` on rank `peer`, after everything earlier in this queue
  kWait,       // blocks the queue until the own `counter` has risen by `value` in this call
  kRecord,     // `event` has happened: tells the caller, or the own queue that awaits it
  kAwait,      // blocks the queue until `event`
};

// Which ranks a multicast reaches: all of the node, or all but the sender (whose landing is the
// source).
enum class Span : uint8_t { kNode, kPeers };

// Safety must hold with all pacing removed.
enum class Sync : uint8_t { kSafety, kPacing };

enum class EventKind : uint8_t {
  kReady,     // caller: sources may be read, the landing may be written
  kGate,      // caller: the network phase may begin
  kReadDone,  // to the caller: sources may be changed or freed
  kDone,      // to the caller: the result may be read
  kLocal,     // between two queues of one rank in one call, named by its index
};

// Recorded once a call; awaited by any number of queues.
struct Event {
  EventKind kind = EventKind::kReady;
  int index = 0;  // kLocal

  bool operator==(const Event&) const = default;
};

struct Operation {
  OpKind kind = OpKind::kCopy;
  int queue = 0;  // index into Program::queues
  int peer = -1;  // kCopy, kPut, kSignal: the rank written to
  Span span = Span::kNode;
  std::vector<Piece> pieces;   // kCopy, kMulticast, kZero
  std::vector<PutPiece> puts;  // kPut
  std::vector<CastPiece> casts;
  std::vector<SumPiece> sums;
  std::vector<LandPiece> lands;
  bool accumulate = false;  // kSum, kLand: adds to dst instead of storing
  bool scaled = false;      // kSum: multiplies by the call's scale; kLand always does
  Counter counter;          // kSignal (producer = own rank), kWait
  int64_t value = 0;        // kWait, relative to the counter's base
  Sync sync = Sync::kSafety;
  Event event;  // kRecord, kAwait
};

// What the programs of a call add to one of this rank's counters.
struct Increment {
  Counter counter;
  int64_t value = 0;
};

// Lanes progress independently: their counters, queues and regions are apart.
enum class Lane : uint8_t { kControl, kAllGather, kReduceScatter };
inline constexpr int kLanes = 3;

struct Program {
  std::string name;  // "all_gather", "refreshing all_gather", "reduce_scatter", "barrier"
  Lane lane = Lane::kControl;
  int rank = 0;
  Topology topology;
  std::vector<Buffer> buffers;
  std::vector<std::string> queues;
  // In enqueue order. The order of one queue is its subsequence; collapsed into one FIFO it must
  // not deadlock.
  std::vector<Operation> operations;
  std::vector<Increment> increments;
};

const char* Name(OpKind kind);
const char* Name(BufferKind kind);
const char* Name(CounterKind kind);
const char* Name(EventKind kind);
const char* Name(Lane lane);

// "staging[2]", "landing".
std::string ToString(const Buffer& buffer);
// "credit[1] of rank 3".
std::string ToString(const Counter& counter);
// "local 4", "ready".
std::string ToString(const Event& event);
// One line, for people and for watchdog reports.
std::string ToString(const Program& program, const Operation& operation);
// One line an operation.
std::string ToText(const Program& program);
// The whole program as JSON.
std::string ToJson(const Program& program);

// The same data operations with every signal, wait, record and await removed, puts as plain copies:
// the floor that benches compare with. Running it gives undefined results.
Program WithoutSynchronisation(Program program);

}  // namespace tide

#endif  // TIDE_PROGRAM_H_
