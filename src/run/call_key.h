// The identity of a call: everything that must be equal on all ranks, and that selects the program.
#ifndef TIDE_RUN_CALL_KEY_H_
#define TIDE_RUN_CALL_KEY_H_

#include <cstdint>
#include <vector>

#include "tide/communicator.h"

namespace tide::internal {

// Words, compared one by one; the hash of the whole is what peers compare.
class CallKey {
 public:
  void Clear() { words_.clear(); }
  void Add(int64_t word) { words_.push_back(word); }
  void Add(const std::vector<DType>& dtypes);
  void Add(const std::vector<int>& values);
  void Add(const std::string& text);
  const std::vector<int64_t>& words() const { return words_; }
  // FNV-1a, never 0.
  uint64_t Hash() const;

 private:
  std::vector<int64_t> words_;
};

// Everything about a group that must be equal on all ranks, the options of its plans included.
int64_t HashGroup(const GroupLayout& layout, const CommunicatorOptions& options);

}  // namespace tide::internal

#endif  // TIDE_RUN_CALL_KEY_H_
