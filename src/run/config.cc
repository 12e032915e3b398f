#include "tide/config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tide/error.h"

namespace tide {
namespace {

constexpr const char* kTimeout = "TIDE_TIMEOUT";
constexpr const char* kMemoryLimit = "TIDE_MEMORY_LIMIT";
constexpr const char* kStagingSlot = "TIDE_STAGING_SLOT";
constexpr const char* kStagingSlots = "TIDE_STAGING_SLOTS";
constexpr const char* kSumCtas = "TIDE_SUM_CTAS";
constexpr const char* kCalibrate = "TIDE_CALIBRATE";
constexpr const char* kKeepLandings = "TIDE_KEEP_LANDINGS";
constexpr const char* kLandingSlots = "TIDE_LANDING_SLOTS";
constexpr const char* kMulticast = "TIDE_MULTICAST";
constexpr const char* kCache = "TIDE_CACHE";
constexpr const char* kNcclLibrary = "TIDE_NCCL_LIBRARY";
constexpr const char* kNodes = "TIDE_NODES";
constexpr const char* kPlacement = "TIDE_PLACEMENT";
constexpr const char* kRoundWidth = "TIDE_ROUND_WIDTH";
constexpr const char* kPasses = "TIDE_PASSES";
// 31 years, for a number that means "for ever": as nanoseconds it fits into 64 bits.
constexpr double kMostSeconds = 1e9;

// Large chunks keep the copy engines busy, and the sum of one runs beside the copy of the next.
// Beside compute a sum takes longer than its copy: with four slots pushes go on meanwhile.
constexpr StagingOptions kGpuStaging = {.slot_bytes = int64_t{128} << 20,
                                        .slots = 4,
                                        .taper_bytes = int64_t{16} << 20,
                                        .node_bytes = int64_t{512} << 20};

constexpr int64_t kGpuFirstCastBytes = int64_t{8} << 20;

ConfigRow Row(const char* name, const char* type, const char* default_value, std::string doc) {
  return {name, type, default_value, std::move(doc), default_value, "default", std::nullopt, ""};
}

std::vector<ConfigRow> Table() {
  return {
      Row(kTimeout, "seconds", "the process group's",
          "how long a call may take before it is an error"),
      Row(kMemoryLimit, "bytes", "none",
          "act as if only this much memory were available to all ranks of the machine, or on each "
          "GPU; all communicators of a process count"),
      Row(kStagingSlot, "bytes", "none; on GPUs 128 MiB, 512 MiB over a node",
          "upper bound of a reduce-scatter staging slot; larger calls go in chunks"),
      Row(kStagingSlots, "count", "1; 4 on GPUs", "n_stg: staging slots for each sibling"),
      Row(kSumCtas, "count", "calibrated, or a quarter of the multiprocessors",
          "CTAs of a sum on a GPU"),
      Row(kCalibrate, "word", "on",
          "off: without TIDE_SUM_CTAS sums take a quarter of the multiprocessors; nothing is "
          "measured"),
      Row(kKeepLandings, "word", "on",
          "off: a backward gathers also what lies where the forward has left it; on several nodes "
          "it always does"),
      Row(kLandingSlots, "count", "2; in place on GPUs of one node up to 4",
          "landing slots of the layers that FSDP2 reshards after forward, at least 2; as many of "
          "the "
          "last ones are kept for the backward"),
      Row(kMulticast, "word", "off",
          "on: use a switch's multicast inside a node where NCCL has it; has run on no GPU yet"),
      Row(kNodes, "count", "1", "virtual nodes that the ranks of one machine are split into"),
      Row(kPlacement, "word", "direct", "where partials of other nodes land: direct, latin_square"),
      Row(kRoundWidth, "count", "2",
          "k: reduce-scatter transfers between nodes under way together; of M nodes at most M - 1 "
          "are"),
      Row(kPasses, "count", "1",
          fmt::format("n_part: passes of a reduce-scatter over several nodes, at most {}; ignored "
                      "by groups on one node",
                      kMostPasses)),
      Row(kCache, "folder", "~/.cache/tide",
          "where the file compiled against torch, a private NCCL and calibrations are kept"),
      Row(kNcclLibrary, "file", "that of `tide nccl install`, or the loaded one",
          "libnccl.so.2 of 2.31.2 or newer for the collectives on GPUs"),
  };
}

// Bytes and counts are whole; 2^53 is the last whole number that a double holds for sure.
void ParseNumber(ConfigRow* row) {
  char* end = nullptr;
  const double number = std::strtod(row->value.c_str(), &end);
  const bool count = row->type == "count";
  const bool whole = number == std::floor(number) && number < (count ? 0x1p31 : 0x1p53);
  if (*end == '\0' && std::isfinite(number) && number > 0 && (row->type == "seconds" || whole)) {
    row->number = row->type == "seconds" ? std::min(number, kMostSeconds) : number;
    return;
  }
  row->problem = fmt::format("{} must be a positive {}number{}, not '{}'", row->name,
                             row->type == "seconds" ? "" : "whole ",
                             count ? "" : " of " + row->type, row->value);
}

void ReadVariable(ConfigRow* row) {
  const char* value = std::getenv(row->name.c_str());
  if (value == nullptr || *value == '\0') return;
  row->value = value;
  row->source = "environment";
  if (row->type != "folder" && row->type != "file" && row->type != "word") ParseNumber(row);
  if (row->name == kLandingSlots && row->number.value_or(2) < 2) {
    row->number.reset();
    row->problem = fmt::format("{} must be at least 2, not '{}'", kLandingSlots, row->value);
  }
  if (row->name == kPasses && row->number.value_or(1) > kMostPasses) {
    row->number.reset();
    row->problem = fmt::format("{} must be at most {}, not '{}'", kPasses, kMostPasses, row->value);
  }
  const bool is_switch =
      row->name == kMulticast || row->name == kCalibrate || row->name == kKeepLandings;
  if (is_switch && row->value != "on" && row->value != "off") {
    row->problem = fmt::format("{} must be on or off, not '{}'", row->name, row->value);
  }
  if (row->name == kPlacement) {
    try {
      ParsePlacement(row->value);
    } catch (const Error& error) {
      row->problem = fmt::format("{}: {}", row->name, error.what());
    }
  }
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// Where `tide nccl install` puts its copy (python/tide/cli/nccl.py); empty if there is none.
std::string InstalledNccl(const std::string& cache_folder) {
  std::filesystem::path cache = cache_folder;
  if (cache.empty()) {
    const std::string home = Variable("XDG_CACHE_HOME");
    cache = home.empty() ? Variable("HOME") + "/.cache/tide" : home + "/tide";
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
  Config config{Table(), {}};
  for (ConfigRow& row : config.rows) ReadVariable(&row);
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
  const std::string named = Variable(kNcclLibrary);
  return named.empty() ? InstalledNccl(Variable(kCache)) : named;
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
  for (const ConfigRow& row : ReadConfig().rows) {
    if (!row.problem.empty()) throw Error(ErrorCode::kInvalidArgument, row.problem);
    if (row.name == kMulticast) options.multicast = row.value == "on";
    if (row.name == kPlacement) options.reduce_scatter.placement = ParsePlacement(row.value);
    if (!row.number) continue;
    if (row.name == kTimeout) {
      options.timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::duration<double>(*row.number));
    }
    if (row.name == kMemoryLimit) options.memory_limit_bytes = static_cast<int64_t>(*row.number);
    if (row.name == kStagingSlot) {
      options.reduce_scatter.staging.slot_bytes = static_cast<int64_t>(*row.number);
      options.reduce_scatter.staging.node_bytes = 0;
    }
    if (row.name == kStagingSlots) {
      options.reduce_scatter.staging.slots = static_cast<int>(*row.number);
    }
    if (row.name == kSumCtas) options.sum_ctas = static_cast<int>(*row.number);
    if (row.name == kNodes) options.nodes = static_cast<int>(*row.number);
    if (row.name == kRoundWidth) options.reduce_scatter.round_width = static_cast<int>(*row.number);
    if (row.name == kPasses) options.reduce_scatter.passes = static_cast<int>(*row.number);
  }
  return options;
}

}  // namespace tide
