// What the verifier is given: a sequence of calls, each the programs of all ranks, and what the
// caller does before, between and after them.
//
// Nothing here knows a collective. What a call must achieve is data too: the contents that the
// caller writes before it and expects after it.
#ifndef TIDE_VERIFY_INPUT_H_
#define TIDE_VERIFY_INPUT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tide/program.h"
#include "tide/verify.h"

namespace tide::verify {

// A piece of memory that every rank has, or every node.
struct Object {
  std::string name;
  bool lane_owned =
      false;  // a region of the lane: shared by all its calls, full of garbage at first
  bool per_node = false;
};

// Bytes of an object from `offset` on.
struct Place {
  int object = -1;
  int64_t offset = 0;
};

enum class ContentKind : uint8_t {
  kStale,     // garbage: must not be summed and must not reach a result
  kZero,      //
  kShard,     // elements of `rank`'s shard of a parameter, counted from the shard's start
  kGradient,  // elements of `rank`'s gradient of a parameter, counted from the parameter's start
  kOutput,    // what the output held before the call; counted like gradients
  kReduced,   // the sum over all ranks' gradients; counted like gradients
};

// How a reduced element comes about: waves of contributors, each summed in fp32 in order, scaled,
// and added to what was there. Contributor c of node m is node (m - c) mod M.
struct Reduction {
  Topology topology;
  std::vector<std::vector<int>> waves;
  bool accumulate = false;
};

// What an interval of memory holds, or must hold.
struct Content {
  Place place;
  int64_t bytes = 0;
  ContentKind kind = ContentKind::kStale;
  DType dtype = DType::kF32;         // as stored
  DType source_dtype = DType::kF32;  // kShard, kGradient, kOutput: before rounding to `dtype`
  int rank = 0;
  int param = 0;
  int64_t first_elem = 0;
  int version = 0;  // the call that the caller wrote it for
  std::shared_ptr<const Reduction> reduction;
};

// Queues of the caller, one of each a rank. Sources are freed on a queue of their own, so that a
// free is ordered by nothing but the event that allows it.
enum class CallerQueue : uint8_t { kMain, kFreeAllGather, kFreeReduceScatter };
inline constexpr int kCallerQueues = 3;

struct CallerStep {
  enum class Kind : uint8_t { kAwait, kRecord, kWrite, kRead };
  Kind kind = Kind::kAwait;
  CallerQueue queue = CallerQueue::kMain;
  int call = -1;
  Event event;       // kAwait, kRecord
  std::string what;  // kWrite, kRead: for people
  // kWrite: what is there afterwards; kRead: what must be there.
  std::function<std::vector<Content>(int rank)> contents;
};

struct Call {
  std::vector<std::shared_ptr<const Program>> programs;  // one a rank
  // Where the programs' buffers lie: on all ranks alike.
  std::map<std::pair<BufferKind, int>, Place> places;
  // A worst case for the calls after it: each access to a lane-owned object touches the whole
  // object; its values and its races with itself or other predecessors are not looked at.
  bool predecessor = false;
  std::vector<CallerStep> before;  // in order, before the programs are issued
};

struct Input {
  std::string name;
  Topology topology;
  std::vector<Object> objects;
  std::vector<Call> calls;
  std::vector<CallerStep> after;
  // Rank r issues its calls in the order issue_order[r]; empty: 0, 1, 2, ...
  std::vector<std::vector<int>> issue_order;
};

VerifyResult Verify(const Input& input, const VerifyOptions& options);

}  // namespace tide::verify

#endif  // TIDE_VERIFY_INPUT_H_
