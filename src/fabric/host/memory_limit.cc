#include "fabric/host/memory_limit.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace tide::host {
namespace {

std::optional<int64_t> ReadNumber(const std::filesystem::path& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // missing, or "max"
}

int64_t MemAvailable() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("MemAvailable:", 0) == 0) {
      std::istringstream fields(line.substr(13));
      int64_t kib = 0;
      fields >> kib;
      return kib * 1024;
    }
  }
  return std::numeric_limits<int64_t>::max();
}

void Tighten(MemoryLimit* limit, int64_t available, const std::string& source) {
  if (available < limit->available_bytes) *limit = {std::max<int64_t>(available, 0), source};
}

// Page cache that the kernel would give back first counts as free, as `free` and MemAvailable do.
int64_t Reclaimable(const std::filesystem::path& folder) {
  std::ifstream file(folder / "memory.stat");
  std::string key;
  int64_t value = 0;
  while (file >> key >> value) {
    if (key == "inactive_file" || key == "total_inactive_file") return value;
  }
  return 0;
}

// Walks from this process's cgroup up to the root of the hierarchy.
void TightenByCgroup(MemoryLimit* limit, const std::filesystem::path& root, std::string path,
                     const char* max_name, const char* current_name) {
  while (true) {
    const std::filesystem::path folder = root / path.substr(path.empty() ? 0 : 1);
    const auto max = ReadNumber(folder / max_name);
    const auto current = ReadNumber(folder / current_name);
    if (max && current) {
      Tighten(limit, *max - *current + Reclaimable(folder),
              "cgroup limit " + (folder / max_name).string());
    }
    if (path.empty() || path == "/") return;
    path = path.substr(0, path.rfind('/'));
  }
}

}  // namespace

MemoryLimit ReadMemoryLimit() {
  MemoryLimit limit{MemAvailable(), "MemAvailable of /proc/meminfo"};
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      TightenByCgroup(&limit, "/sys/fs/cgroup", path, "memory.max", "memory.current");
    } else if (controllers.find(",memory,") != std::string::npos) {
      TightenByCgroup(&limit, "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                      "memory.usage_in_bytes");
    }
  }
  return limit;
}

}  // namespace tide::host
