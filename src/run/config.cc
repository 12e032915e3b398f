#include "tide/config.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace tide {
namespace {

std::vector<ConfigRow> Table() {
  return {
      {"TIDE_TIMEOUT", "seconds", "the process group's",
       "how long any wait may take before it is an error", "", ""},
      {"TIDE_MEMORY_LIMIT", "bytes", "none", "act as if only this much memory were available", "",
       ""},
      {"TIDE_STAGING_SLOT", "bytes", "none",
       "upper bound of a reduce-scatter staging slot; larger calls go in chunks", "", ""},
      {"TIDE_CACHE", "folder", "~/.cache/tide", "where the file compiled against torch is kept", "",
       ""},
  };
}

}  // namespace

Config ReadConfig() {
  Config config{Table(), {}};
  for (ConfigRow& row : config.rows) {
    const char* value = std::getenv(row.name.c_str());
    row.value = value != nullptr ? value : row.default_value;
    row.source = value != nullptr ? "environment" : "default";
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "TIDE_", 5) != 0) continue;
    const std::string name(*entry, std::strcspn(*entry, "="));
    const bool known = std::any_of(config.rows.begin(), config.rows.end(),
                                   [&](const ConfigRow& row) { return row.name == name; });
    if (!known)
      config.warnings.push_back("unknown variable " + name + " is ignored; see `tide info`");
  }
  return config;
}

}  // namespace tide
