// How much memory this process may still take, asked before it is reserved: an error at set-up
// names the limit, a fault in the middle of training could not.
#ifndef TIDE_FABRIC_HOST_MEMORY_LIMIT_H_
#define TIDE_FABRIC_HOST_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace tide::host {

struct MemoryLimit {
  int64_t available_bytes = 0;
  std::string
      source;  // "MemAvailable of /proc/meminfo", "cgroup limit /sys/fs/cgroup/a/memory.max"
};

// The tightest of: available memory of the machine, and every cgroup (v2 and v1) above this
// process.
MemoryLimit ReadMemoryLimit();

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_MEMORY_LIMIT_H_
