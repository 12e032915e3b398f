// Options from the environment: one table, read once, printed by `tide info`.
#ifndef TIDE_CONFIG_H_
#define TIDE_CONFIG_H_

#include <string>
#include <vector>

namespace tide {

struct ConfigRow {
  std::string name;
  std::string type;
  std::string default_value;
  std::string doc;
  std::string value;   // what is in force
  std::string source;  // "default" or "environment"
};

struct Config {
  std::vector<ConfigRow> rows;
  std::vector<std::string> warnings;  // unknown TIDE_* variables
};

// Reads the environment now.
Config ReadConfig();

}  // namespace tide

#endif  // TIDE_CONFIG_H_
