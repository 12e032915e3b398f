#include "tide/config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "tide/error.h"

namespace tide {
namespace {

// 31 years, for a number that means "for ever": as nanoseconds it fits into 64 bits.
constexpr double kMostSeconds = 1e9;

// Large chunks keep the copy engines busy, and the sum of one runs beside the copy of the next.
// Beside compute a sum takes longer than its copy: with four slots pushes go on meanwhile.
constexpr StagingOptions kGpuStaging = {.slot_bytes = int64_t{128} << 20,
                                        .slots = 4,
                                        .taper_bytes = int64_t{16} << 20,
                                        .node_bytes = int64_t{512} << 20};

constexpr int64_t kGpuFirstCastBytes = int64_t{8} << 20;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// A TIDE_* variable: all that is known of it.
struct Variable {
  const char* name;
  const char* type;
  const char* default_value;
  std::string doc;
  // Null if others read it: the adapter, say. Called with a valid number, or the word.
  void (*set)(CommunicatorOptions*, const ConfigRow&) = nullptr;
  bool common = false;
  double least = 0, most = std::numeric_limits<double>::infinity();  // of a number
};

int Count(const ConfigRow& row) { return static_cast<int>(*row.number); }
int64_t Bytes(const ConfigRow& row) { return static_cast<int64_t>(*row.number); }
constexpr bool kCommon = true;

void SetTimeout(CommunicatorOptions* options, const ConfigRow& row) {
  options->timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(*row.number));
}

void SetStagingSlot(CommunicatorOptions* options, const ConfigRow& row) {
  options->reduce_scatter.staging.slot_bytes = Bytes(row);
  options->reduce_scatter.staging.node_bytes = 0;
}

// Those are common that have to be equal for ranks to do the same. A sum's bits don't depend on its
// CTAs, memory is each rank's own, and on multicast the ranks agree at set-up.
std::vector<Variable> Variables() {
  using Options = CommunicatorOptions;
  using Row = ConfigRow;
  return {
      {"TIDE_TIMEOUT", "seconds", "the process group's",
       "how long a call may take before it is an error", SetTimeout, kCommon},
      {"TIDE_MEMORY_LIMIT", "bytes", "none",
       "act as if only this much memory were available to all ranks of the machine, or on each "
       "GPU; all communicators of a process count",
       [](Options* options, const Row& row) { options->memory_limit_bytes = Bytes(row); }},
      {"TIDE_STAGING_SLOT", "bytes", "none; on GPUs 128 MiB, 512 MiB over a node",
       "upper bound of a reduce-scatter staging slot; larger calls go in chunks", SetStagingSlot,
       kCommon},
      {"TIDE_STAGING_SLOTS", "count", "1; 4 on GPUs", "n_stg: staging slots for each sibling",
       [](Options* options, const Row& row) { options->reduce_scatter.staging.slots = Count(row); },
       kCommon},
      {"TIDE_SUM_CTAS", "count", "calibrated, or a quarter of the multiprocessors",
       "CTAs of a sum on a GPU",
       [](Options* options, const Row& row) { options->sum_ctas = Count(row); }},
      {"TIDE_CALIBRATE", "switch", "on",
       "off: without TIDE_SUM_CTAS sums take a quarter of the multiprocessors; nothing is measured",
       nullptr, kCommon},
      {"TIDE_KEEP_LANDINGS", "switch", "on",
       "off: a backward gathers also what lies where the forward has left it; on several nodes it "
       "always does",
       nullptr, kCommon},
      {"TIDE_LANDING_SLOTS", "count", "2; in place on GPUs of one node up to 4",
       "landing slots of the layers that FSDP2 reshards after forward, at least 2; as many of the "
       "last ones are kept for the backward",
       nullptr, kCommon, 2},
      {"TIDE_MULTICAST", "switch", "off",
       "on: use a switch's multicast inside a node where NCCL has it; has run on no GPU yet",
       [](Options* options, const Row& row) { options->multicast = row.value == "on"; }},
      {"TIDE_NODES", "count", "1", "virtual nodes that the ranks of one machine are split into",
       [](Options* options, const Row& row) { options->nodes = Count(row); }, kCommon},
      {"TIDE_PLACEMENT", "word", "direct",
       "where partials of other nodes land: direct, latin_square",
       [](Options* options, const Row& row) {
         options->reduce_scatter.placement = ParsePlacement(row.value);
       },
       kCommon},
      {"TIDE_ROUND_WIDTH", "count", "2",
       "k: reduce-scatter transfers between nodes under way together; of M nodes at most M - 1 are",
       [](Options* options, const Row& row) { options->reduce_scatter.round_width = Count(row); },
       kCommon},
      {"TIDE_PASSES", "count", "1",
       fmt::format("n_part: passes of a reduce-scatter over several nodes, at most {}; ignored by "
                   "groups on one node",
                   kMostPasses),
       [](Options* options, const Row& row) { options->reduce_scatter.passes = Count(row); },
       kCommon, 0, kMostPasses},
      {"TIDE_CACHE", "folder", "~/.cache/tide",
       "where the file compiled against torch, a private NCCL and calibrations are kept"},
      {"TIDE_NCCL_LIBRARY", "file", "that of `tide nccl install`, or the loaded one",
       "libnccl.so.2 of 2.31.2 or newer for the collectives on GPUs"},
  };
}

// Bytes and counts are whole; 2^53 is the last whole number that a double holds for sure.
void ParseNumber(const Variable& variable, ConfigRow* row) {
  char* end = nullptr;
  const double number = std::strtod(row->value.c_str(), &end);
  const bool count = row->type == "count", seconds = row->type == "seconds";
  const bool whole = number == std::floor(number) && number < (count ? 0x1p31 : 0x1p53);
  if (*end != '\0' || !std::isfinite(number) || number <= 0 || (!seconds && !whole)) {
    row->problem =
        fmt::format("{} must be a positive {}number{}, not '{}'", row->name,
                    seconds ? "" : "whole ", count ? "" : " of " + row->type, row->value);
  } else if (number < variable.least) {
    row->problem =
        fmt::format("{} must be at least {}, not '{}'", row->name, variable.least, row->value);
  } else if (number > variable.most) {
    row->problem =
        fmt::format("{} must be at most {}, not '{}'", row->name, variable.most, row->value);
  } else {
    row->number = seconds ? std::min(number, kMostSeconds) : number;
  }
}

void ParseWord(const Variable& variable, ConfigRow* row) {
  if (row->type == "switch" && row->value != "on" && row->value != "off") {
    row->problem = fmt::format("{} must be on or off, not '{}'", row->name, row->value);
    return;
  }
  if (variable.set == nullptr) return;
  try {
    CommunicatorOptions tried;
    variable.set(&tried, *row);
  } catch (const Error& error) {
    row->problem = fmt::format("{}: {}", row->name, error.what());
  }
}

ConfigRow Read(const Variable& variable) {
  ConfigRow row;
  row.name = variable.name;
  row.type = variable.type;
  row.default_value = variable.default_value;
  row.doc = variable.doc;
  row.common = variable.common;
  row.value = variable.default_value;
  row.source = "default";
  const std::string value = Environment(variable.name);
  if (value.empty()) return row;
  row.value = value;
  row.source = "environment";
  const bool number = row.type == "seconds" || row.type == "bytes" || row.type == "count";
  if (number) {
    ParseNumber(variable, &row);
  } else {
    ParseWord(variable, &row);
  }
  return row;
}

// Where `tide nccl install` puts its copy (python/tide/cli/nccl.py); empty if there is none.
std::string InstalledNccl(const std::string& cache_folder) {
  std::filesystem::path cache = cache_folder;
  if (cache.empty()) {
    const std::string home = Environment("XDG_CACHE_HOME");
    cache = home.empty() ? Environment("HOME") + "/.cache/tide" : home + "/tide";
  }
  const std::filesystem::path library = cache / "nccl" / "libnccl.so.2";
  std::error_code missing;
  return std::filesystem::exists(library, missing) ? library.string() : "";
}

// The limit of the environment is a limit of the process.
std::shared_ptr<ReservedBytes> ReservedByProcess(FabricKind fabric) {
  static const auto host = std::make_shared<ReservedBytes>(0);
  static const auto gpu = std::make_shared<ReservedBytes>(0);
  return fabric == FabricKind::kHost ? host : gpu;
}

}  // namespace

Config ReadConfig() {
  Config config;
  for (const Variable& variable : Variables()) config.rows.push_back(Read(variable));
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

std::string NcclLibrary() {
  const std::string named = Environment("TIDE_NCCL_LIBRARY");
  return named.empty() ? InstalledNccl(Environment("TIDE_CACHE")) : named;
}

CommunicatorOptions OptionsFromEnvironment(FabricKind fabric) {
  CommunicatorOptions options;
  options.fabric = fabric;
  options.nccl_library = NcclLibrary();
  options.reserved_bytes = ReservedByProcess(fabric);
  if (fabric == FabricKind::kNccl) {
    options.reduce_scatter.staging = kGpuStaging;
    options.all_gather.first_cast_bytes = kGpuFirstCastBytes;
  }
  for (const Variable& variable : Variables()) {
    const ConfigRow row = Read(variable);
    if (!row.problem.empty()) throw Error(ErrorCode::kInvalidArgument, row.problem);
    if (row.source == "environment" && variable.set != nullptr) variable.set(&options, row);
  }
  return options;
}

}  // namespace tide
