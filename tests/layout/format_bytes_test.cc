#include "layout/format_bytes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace tide {
namespace {

TEST(FormatBytes, TheUnitFitsTheNumber) {
  const std::vector<std::pair<int64_t, std::string>> cases = {
      {0, "0 B"},
      {1023, "1023 B"},
      {1024, "1 KiB"},
      {4096, "4 KiB"},
      {1536, "1.5 KiB"},
      {(1 << 20) - 1, "1 MiB"},
      {64 << 20, "64 MiB"},
      {int64_t{3} << 29, "1.5 GiB"},
      {std::numeric_limits<int64_t>::max(), "8 EiB"},
  };
  for (const auto& [bytes, expected] : cases) EXPECT_EQ(FormatBytes(bytes), expected);
}

}  // namespace
}  // namespace tide
