// What a fabric offers to the communicator: segments, peer addresses and the execution of programs.
//
// A fabric knows no collective. It resolves symbolic buffers through a Binding and counters through
// their bases.
#ifndef TIDE_FABRIC_FABRIC_H_
#define TIDE_FABRIC_FABRIC_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tide/communicator.h"
#include "tide/program.h"

namespace tide {

// Addresses of one call, one entry a buffer of the program. Exactly one of the two is set: `local`
// for own memory, `symmetric` for buffers that lie at the same segment offset on every rank.
struct BufferAddress {
  void* local = nullptr;
  SegmentAddress symmetric;
};

struct Binding {
  std::vector<BufferAddress> buffers;
  float scale = 1.0F;
};

// Parameters a call identity can name one by one; a larger group is compared by its key alone.
inline constexpr int kNamedParams = 1024;
inline constexpr int kCallTextBytes = 232;

// Who calls what: published at entry, and compared by every peer before it uses what this rank has
// sent. Plain data: it is copied into shared memory.
struct CallIdentity {
  uint64_t sequence = 0;
  uint64_t key = 0;
  int32_t group = -1;
  int32_t params = 0;  // of the group
  uint64_t takes_part[kNamedParams / 64] = {};
  char text[kCallTextBytes] = {};  // "reduce_scatter of group 'layers.3'", cut to fit
};

// What a fabric makes of a program once, to run it many times.
class Prepared {
 public:
  virtual ~Prepared() = default;
};

// The call follows what `ready` holds and precedes what `done` gets next.
struct CallStreams {
  void* ready = nullptr;
  void* done = nullptr;
};

// One call as executors and error messages see it.
struct Call {
  const Program* program = nullptr;
  std::shared_ptr<Prepared> prepared;  // what the fabric made of the program
  const Binding* binding = nullptr;
  CallIdentity identity;
  const GroupLayout* layout = nullptr;  // null for a barrier
  std::optional<CallStreams> streams;   // see AllGatherCall
};

// Receives one span an operation.
class TraceSink {
 public:
  virtual ~TraceSink() = default;
  virtual void Add(const Call& call, const Operation& op, double start, double end) = 0;
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual const Topology& topology() const = 0;
  virtual int rank() const = 0;
  // Collective. Throws the same Error(kOutOfMemory) on every rank if one of them has no room.
  virtual SegmentView AddSegment(int64_t bytes, const std::string& label, SegmentKind kind) = 0;
  // See Communicator, all three.
  virtual const std::string& unshared_reason() const = 0;
  virtual const std::string& unwatched_reason() const = 0;
  virtual int aliased_streams() const { return 0; }
  virtual std::string unicast_reason() const { return "only GPUs have multicast"; }
  // Throws Error(kInvalidArgument) unless [offset, offset + bytes) lies in the segment, and starts
  // at a page if the node shares it.
  virtual void CheckRange(SegmentAddress address, int64_t bytes) const = 0;
  virtual std::shared_ptr<Prepared> Prepare(const Program& /*program*/) { return nullptr; }
  // Runs the program to its end, or enqueues it if the call has streams; returns the seconds in
  // which nothing could move.
  virtual double Execute(const Call& call, TraceSink* trace) = 0;
};

}  // namespace tide

#endif  // TIDE_FABRIC_FABRIC_H_
