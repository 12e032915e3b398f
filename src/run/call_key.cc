#include "run/call_key.h"

#include <string>

namespace tide::internal {

void CallKey::Add(const std::vector<DType>& dtypes) {
  Add(static_cast<int64_t>(dtypes.size()));
  for (const DType dtype : dtypes) Add(static_cast<int64_t>(dtype));
}

void CallKey::Add(const std::vector<int>& values) {
  Add(static_cast<int64_t>(values.size()));
  for (const int value : values) Add(value);
}

void CallKey::Add(const std::string& text) {
  Add(static_cast<int64_t>(text.size()));
  for (const char c : text) Add(c);
}

uint64_t CallKey::Hash() const {
  uint64_t hash = 0xcbf29ce484222325;
  for (const int64_t word : words_) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash ^= static_cast<uint64_t>(word) >> shift & 0xff;
      hash *= 0x100000001b3;
    }
  }
  return hash != 0 ? hash : 1;
}

}  // namespace tide::internal
