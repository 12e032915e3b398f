#include "layout/format_bytes.h"

#include <array>
#include <cstdio>

namespace tide {

std::string FormatBytes(int64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  // From 1023.95 on one decimal would show 1024.0.
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.1f", value);
  std::string text = digits.data();
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text + " " + kUnits[unit];
}

}  // namespace tide
