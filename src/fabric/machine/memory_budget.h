// What CommunicatorOptions::memory_limit_bytes allows: a bound on the sum of what is reserved.
#ifndef TIDE_FABRIC_MACHINE_MEMORY_BUDGET_H_
#define TIDE_FABRIC_MACHINE_MEMORY_BUDGET_H_

#include <cstdint>
#include <memory>
#include <string>

#include "tide/communicator.h"

namespace tide::machine {

// Throws Error(kOutOfMemory): `need` ("landing needs 64 MiB") is more than `available_bytes`, as
// `source` says.
[[noreturn]] void RefuseMemory(const std::string& need, int64_t available_bytes,
                               const std::string& source);

class MemoryBudget {
 public:
  explicit MemoryBudget(const CommunicatorOptions& options);

  // Counts `bytes` until the last share of what it returns is gone. Throws Error(kOutOfMemory) if
  // the sum would exceed the limit; `need` as above.
  std::shared_ptr<void> Take(int64_t bytes, const std::string& need);

 private:
  const int64_t limit_bytes_;  // 0: none
  const std::shared_ptr<ReservedBytes> reserved_;
};

}  // namespace tide::machine

#endif  // TIDE_FABRIC_MACHINE_MEMORY_BUDGET_H_
