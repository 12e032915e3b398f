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

int64_t HashGroup(const GroupLayout& layout, const CommunicatorOptions& options) {
  CallKey key;
  const ReduceScatterOptions& reduce = options.reduce_scatter;
  for (const int64_t word :
       {options.all_gather.first_cast_bytes, options.all_gather.head_bytes,
        int64_t{options.all_gather.contexts}, options.all_gather.min_stripe_bytes,
        static_cast<int64_t>(reduce.placement), static_cast<int64_t>(reduce.mode),
        int64_t{reduce.wave_width}, int64_t{reduce.round_width}, int64_t{reduce.passes},
        int64_t{reduce.generations}, int64_t{reduce.contexts}, reduce.min_stripe_bytes,
        reduce.staging.slot_bytes, int64_t{reduce.staging.slots}, reduce.staging.taper_bytes,
        reduce.staging.node_bytes}) {
    key.Add(word);
  }
  key.Add(layout.name());
  key.Add(layout.ranks());
  for (const ParamLayout& param : layout.params()) {
    key.Add(param.shape.name);
    key.Add(param.shape.rows);
    key.Add(param.shape.row_elems);
    key.Add(static_cast<int64_t>(param.shape.dtype));
  }
  return static_cast<int64_t>(key.Hash());
}

}  // namespace tide::internal
