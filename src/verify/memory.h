// Access history and contents of one piece of memory, by byte interval.
//
// As in FastTrack, an interval keeps its last write and the reads since that no later read covers:
// a write that comes after those comes after everything.
#ifndef TIDE_VERIFY_MEMORY_H_
#define TIDE_VERIFY_MEMORY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "verify/clocks.h"
#include "verify/expressions.h"

namespace tide::verify {

// Consecutive bytes with one value.
struct Portion {
  int64_t bytes = 0;
  Value value;

  bool operator==(const Portion&) const = default;
};

// Adds a portion behind the others, to the last one if it continues that.
void Append(const Portion& portion, std::vector<Portion>* portions);

// Two unordered accesses, at least one of them a write.
struct Conflict {
  int memory = 0;
  Epoch earlier;  // in the simulated order
  bool earlier_writes = false;
  Epoch later;
  bool later_writes = false;
  int64_t begin = 0;
  int64_t end = 0;
};

// What all memories of a run share.
struct History {
  const Clocks& clocks;
  std::function<void(const Conflict&)> report;
  int64_t accesses = 0;
  int64_t pairs = 0;
};

class Memory {
 public:
  Memory(int id, History* history);

  // Appends what [begin, end) holds.
  void Read(int64_t begin, int64_t end, const Actor& actor, std::vector<Portion>* portions);
  // Portions must add up to end - begin.
  void Write(int64_t begin, int64_t end, const Actor& actor, const std::vector<Portion>& portions);
  // The same as Read, but no access.
  void Peek(int64_t begin, int64_t end, std::vector<Portion>* portions) const;
  // A predecessor's access to every byte. Predecessors have no conflicts among themselves.
  void TouchAll(const Actor& actor, bool writes);

 private:
  struct Segment {
    Epoch write;
    Value value;
    std::vector<Epoch> reads;
  };
  // By first byte; a segment ends where the next begins, the last one nowhere.
  using Segments = std::map<int64_t, Segment>;

  Segments::iterator SplitAt(int64_t at);
  int64_t End(Segments::const_iterator it) const;
  void Check(Epoch earlier, bool earlier_writes, const Actor& actor, bool writes, int64_t begin,
             int64_t end);
  void CheckPredecessors(const Actor& actor, bool writes, int64_t begin, int64_t end);
  // Adds the actor and drops what it covers.
  void Remember(const Actor& actor, std::vector<Epoch>* epochs) const;

  const int id_;
  History& history_;
  Segments segments_;
  std::vector<Epoch> predecessor_writes_;
  std::vector<Epoch> predecessor_reads_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_MEMORY_H_
