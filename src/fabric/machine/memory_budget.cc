#include "fabric/machine/memory_budget.h"

#include <fmt/format.h>

#include <algorithm>

#include "layout/format_bytes.h"
#include "tide/error.h"

namespace tide::machine {

void RefuseMemory(const std::string& need, int64_t available_bytes, const std::string& source) {
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("{}, but only {} is available ({}). Raise that limit, use fewer ranks or "
                          "a smaller model.",
                          need, FormatBytes(available_bytes), source));
}

MemoryBudget::MemoryBudget(const CommunicatorOptions& options)
    : limit_bytes_(options.memory_limit_bytes),
      reserved_(options.reserved_bytes ? options.reserved_bytes
                                       : std::make_shared<ReservedBytes>(0)) {}

std::shared_ptr<void> MemoryBudget::Take(int64_t bytes, const std::string& need) {
  int64_t before = reserved_->load();
  do {
    if (limit_bytes_ > 0 && bytes > limit_bytes_ - before) {
      RefuseMemory(need, std::max<int64_t>(limit_bytes_ - before, 0),
                   fmt::format("memory_limit_bytes, TIDE_MEMORY_LIMIT: {}, of which {} is reserved",
                               FormatBytes(limit_bytes_), FormatBytes(before)));
    }
  } while (!reserved_->compare_exchange_weak(before, before + bytes));
  return {nullptr,
          [reserved = reserved_, bytes](void* /*nothing*/) { reserved->fetch_sub(bytes); }};
}

}  // namespace tide::machine
