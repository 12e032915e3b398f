// Options from the environment: one table, the only reader of TIDE_* variables, printed by
// `tide info`.
//
//   Communicator comm(bootstrap, OptionsFromEnvironment());
#ifndef TIDE_CONFIG_H_
#define TIDE_CONFIG_H_

#include <optional>
#include <string>
#include <vector>

#include "tide/communicator.h"

namespace tide {

struct ConfigRow {
  std::string name;
  std::string type;  // "bytes", "seconds", "count", "switch", "word", "folder", "file"
  std::string default_value;
  std::string doc;
  bool common = false;  // the same on all ranks, or enabling fails
  std::string value;    // what is in force
  std::string source;   // "default" or "environment"
  // Of bytes, seconds (at most 1e9, which is for ever) or things; empty if not set or not valid.
  std::optional<double> number;
  std::string problem;  // what is wrong with the value, empty if nothing is
};

struct Config {
  std::vector<ConfigRow> rows;
  std::vector<std::string> warnings;  // unknown TIDE_* variables
};

// Reads the environment now. An empty variable counts as not set.
Config ReadConfig();

// CommunicatorOptions::nccl_library: TIDE_NCCL_LIBRARY, or what `tide nccl install` left; may be
// empty.
std::string NcclLibrary();

// The fabric's defaults with what the environment sets. Throws Error(kInvalidArgument) for a bad
// value.
CommunicatorOptions OptionsFromEnvironment(FabricKind fabric = FabricKind::kHost);

}  // namespace tide

#endif  // TIDE_CONFIG_H_
