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
  kShard,     // index = parameter; own memory; the padded shard
  kLanding,   // symmetric; one slot of the group's unsharded parameters
  kGradient,  // index = position among the participating parameters; own memory
  kStaging,   // index = (filling rank - owner) mod L, at least 1; symmetric
  kOutput,    // own memory; the reduce-scatter's result
};

// A symbolic buffer. Symmetric buffers lie in segments and can be written by peers.
struct Buffer {
  BufferKind kind = BufferKind::kShard;
  int index = 0;
  int64_t bytes = 0;

  bool symmetric() const { return kind == BufferKind::kLanding || kind == BufferKind::kStaging; }
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

// dst = [dst +] scale * (fp32 sum of sources in the listed order); the scale belongs to the call.
struct SumPiece {
  Ref dst;
  std::vector<Ref> sources;
  int64_t elems = 0;
  DType dst_dtype = DType::kF32;
  DType src_dtype = DType::kF32;
};

enum class OpKind : uint8_t {
  kCopy,       // pieces to the rank `peer` of the same node (or itself)
  kMulticast,  // pieces to every rank of the node; see Span
  kCast,       // casts, own memory
  kSum,        // sums, own memory
  kZero,       // clears the dst of each piece, own memory
  kSignal,     // adds one to `counter` on rank `peer`
  kWait,       // blocks the queue until the own `counter` has risen by `value` in this call
  kRecord,     // tells the caller that `event` has happened
  kAwait,      // blocks the queue until the caller's `event`
};

// Which ranks a multicast reaches: all of the node, or all but the sender (whose landing is the
// source).
enum class Span : uint8_t { kNode, kPeers };

// Safety must hold with all pacing removed.
enum class Sync : uint8_t { kSafety, kPacing };

enum class Event : uint8_t { kReady, kReadDone, kDone };

// Monotonic counters have one producing rank and queue and one waiting queue. A counter lives on
// the waiting rank and is named by the producer: (kind, producer).
enum class CounterKind : uint8_t {
  kEntry,   // the producer has entered the call: its landing may be written, its call identity can
            // be read
  kDone,    // the producer's shards have landed here
  kFilled,  // the producer has filled the next staging slot here
  kReleased,  // the producer has read the next staging slot that this rank filled there
};
inline constexpr int kCounterKinds = 4;

struct Counter {
  CounterKind kind = CounterKind::kEntry;
  int producer = 0;  // rank
};

struct Operation {
  OpKind kind = OpKind::kCopy;
  int queue = 0;  // index into Program::queues
  int peer = -1;  // kCopy, kSignal: the rank written to
  Span span = Span::kNode;
  std::vector<Piece> pieces;  // kCopy, kMulticast, kZero
  std::vector<CastPiece> casts;
  std::vector<SumPiece> sums;
  bool accumulate = false;  // kSum
  Counter counter;          // kSignal, kWait
  int64_t value = 0;        // kWait, relative to the counter's base
  Sync sync = Sync::kSafety;
  Event event = Event::kReady;  // kRecord, kAwait
};

// What the peers' programs add to one of this rank's counters during the call.
struct Increment {
  Counter counter;
  int64_t value = 0;
};

struct Program {
  std::string name;  // "all_gather", "reduce_scatter", "barrier"
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
const char* Name(Event event);

// "staging[2]", "landing".
std::string ToString(const Buffer& buffer);
// One line, for people and for watchdog reports.
std::string ToString(const Program& program, const Operation& operation);
// One line an operation.
std::string ToText(const Program& program);
// The whole program as JSON.
std::string ToJson(const Program& program);

// The same data operations with every signal, wait, record and await removed: the floor that
// benches compare with. Running it gives undefined results.
Program WithoutSynchronisation(Program program);

}  // namespace tide

#endif  // TIDE_PROGRAM_H_
