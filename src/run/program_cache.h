// Programs that were planned, by the key of their calls.
#ifndef TIDE_RUN_PROGRAM_CACHE_H_
#define TIDE_RUN_PROGRAM_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fabric/fabric.h"
#include "tide/program.h"

namespace tide::internal {

// A program, and what the fabric has made of it.
struct PlannedProgram {
  Program program;
  std::shared_ptr<Prepared> prepared;
};

// Which parameters have gradients can change from call to call, and each set is a program: of one
// collective of one group the least recently used ones go. A group of a training job has two to
// four: a bank each, with and without accumulation. On a GPU freeing a program's tables waits for
// the device.
inline constexpr size_t kMostVariants = 32;

class ProgramCache {
 public:
  // A key's first two words are the collective and the group. Null if there is none; else it stays
  // until the next Add or Clear.
  const PlannedProgram* Find(const std::vector<int64_t>& key);
  const PlannedProgram& Add(const std::vector<int64_t>& key, PlannedProgram program);
  void Clear() { families_.clear(); }

 private:
  struct Entry {
    PlannedProgram program;
    uint64_t used = 0;
  };
  using Family = std::map<std::vector<int64_t>, Entry>;

  std::map<std::pair<int64_t, int64_t>, Family> families_;
  uint64_t uses_ = 0;
};

}  // namespace tide::internal

#endif  // TIDE_RUN_PROGRAM_CACHE_H_
