#include "fabric/machine/last_words.h"

#include <cstring>

namespace tide::machine {

void LastWords::Leave(const Error& error) {
  if (left()) return;
  code_ = static_cast<int32_t>(error.code());
  peer_ = error.context().peer;
  std::strncpy(words_, error.what(), kLastWordsBytes - 1);
  left_.store(1, std::memory_order_release);
}

Error LastWords::Take(int owner, int rank) const {
  ErrorContext context;
  context.rank = rank;
  context.peer = peer_ >= 0 && peer_ != rank ? peer_ : owner;
  return {static_cast<ErrorCode>(code_), words_, context};
}

}  // namespace tide::machine
