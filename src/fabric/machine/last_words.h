// Why a rank has given up, in memory that its peers read.
#ifndef TIDE_FABRIC_MACHINE_LAST_WORDS_H_
#define TIDE_FABRIC_MACHINE_LAST_WORDS_H_

#include <atomic>
#include <cstdint>

#include "tide/error.h"

namespace tide::machine {

inline constexpr int kLastWordsBytes = 1024;

// Lies in zeroed shared memory.
class LastWords {
 public:
  // The first words stay.
  void Leave(const Error& error);
  bool left() const { return left_.load(std::memory_order_acquire) != 0; }
  // The error that `owner` gave up with, as `rank` shall raise it.
  Error Take(int owner, int rank) const;

 private:
  std::atomic<uint32_t> left_;  // release after the fields below
  int32_t code_;
  int32_t peer_;
  char words_[kLastWordsBytes];
};

}  // namespace tide::machine

#endif  // TIDE_FABRIC_MACHINE_LAST_WORDS_H_
