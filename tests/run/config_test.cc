// The TIDE_* variables: what is known, what is valid, and what they set.
#include "tide/config.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "tide/error.h"

namespace tide {
namespace {

// Sets a variable for one test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

ConfigRow Row(const std::string& name) {
  for (const ConfigRow& row : ReadConfig().rows) {
    if (row.name == name) return row;
  }
  ADD_FAILURE() << name << " is not in the table";
  return {};
}

TEST(Config, DefaultsWhereNothingIsSet) {
  const Variable empty("TIDE_STAGING_SLOT", "");
  for (const ConfigRow& row : ReadConfig().rows) {
    EXPECT_EQ(row.source, "default") << row.name;
    EXPECT_EQ(row.value, row.default_value);
    EXPECT_FALSE(row.number.has_value());
    EXPECT_EQ(row.problem, "");
  }
  EXPECT_TRUE(ReadConfig().warnings.empty());
  EXPECT_EQ(OptionsFromEnvironment().reduce_scatter.staging.slot_bytes, 0);
}

TEST(Config, VariablesSetTheOptions) {
  const Variable timeout("TIDE_TIMEOUT", "2.5");
  const Variable limit("TIDE_MEMORY_LIMIT", "1048576");
  const Variable slot("TIDE_STAGING_SLOT", "4096");
  const CommunicatorOptions options = OptionsFromEnvironment();
  EXPECT_EQ(options.timeout, std::chrono::milliseconds(2500));
  EXPECT_EQ(options.memory_limit_bytes, 1048576);
  EXPECT_EQ(options.reduce_scatter.staging.slot_bytes, 4096);
  EXPECT_EQ(Row("TIDE_TIMEOUT").source, "environment");
}

TEST(Config, GpusHaveTheirOwnDefaults) {
  const CommunicatorOptions gpu = OptionsFromEnvironment(FabricKind::kNccl);
  EXPECT_EQ(gpu.fabric, FabricKind::kNccl);
  EXPECT_EQ(gpu.reduce_scatter.staging.slot_bytes, 128 << 20);
  EXPECT_EQ(gpu.reduce_scatter.staging.slots, 4);
  EXPECT_GT(gpu.reduce_scatter.staging.taper_bytes, 0);
  EXPECT_GT(gpu.all_gather.first_cast_bytes, 0);
  const Variable multicast("TIDE_MULTICAST", "on");
  EXPECT_FALSE(gpu.multicast);
  EXPECT_TRUE(OptionsFromEnvironment(FabricKind::kNccl).multicast);
  const Variable slots("TIDE_STAGING_SLOTS", "3");
  const Variable ctas("TIDE_SUM_CTAS", "24");
  EXPECT_EQ(OptionsFromEnvironment(FabricKind::kNccl).reduce_scatter.staging.slots, 3);
  EXPECT_EQ(OptionsFromEnvironment().reduce_scatter.staging.slots, 3);
  EXPECT_EQ(OptionsFromEnvironment(FabricKind::kNccl).sum_ctas, 24);
}

TEST(Config, ASingleLandingSlotIsRefused) {
  const Variable slots("TIDE_LANDING_SLOTS", "1");
  EXPECT_EQ(Row("TIDE_LANDING_SLOTS").problem, "TIDE_LANDING_SLOTS must be at least 2, not '1'");
  EXPECT_FALSE(Row("TIDE_LANDING_SLOTS").number);
}

TEST(Config, BadNumbersAreNamed) {
  for (const char* bad : {"soon", "-1", "0", "inf", "nan", "1x", "1.5"}) {
    const Variable slot("TIDE_STAGING_SLOT", bad);
    const std::string expected =
        "TIDE_STAGING_SLOT must be a positive whole number of bytes, not '" + std::string(bad) +
        "'";
    EXPECT_EQ(Row("TIDE_STAGING_SLOT").problem, expected);
    EXPECT_FALSE(Row("TIDE_STAGING_SLOT").number.has_value());
    try {
      OptionsFromEnvironment();
      ADD_FAILURE() << "expected an error for " << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(error.what(), expected);
    }
  }
}

TEST(Config, PassesAreBounded) {
  for (const char* most : {"1", "64"}) {
    const Variable passes("TIDE_PASSES", most);
    EXPECT_EQ(OptionsFromEnvironment().reduce_scatter.passes, std::stoi(most));
  }
  const Variable passes("TIDE_PASSES", "65");
  EXPECT_EQ(Row("TIDE_PASSES").problem, "TIDE_PASSES must be at most 64, not '65'");
  EXPECT_FALSE(Row("TIDE_PASSES").number.has_value());
  EXPECT_THROW(OptionsFromEnvironment(), Error);
}

// What the table says is what is in force, also for those who read it in place of the options.
TEST(Config, LongTimeoutsAreCut) {
  const Variable timeout("TIDE_TIMEOUT", "1e10");
  EXPECT_EQ(Row("TIDE_TIMEOUT").number, 1e9);
  EXPECT_EQ(OptionsFromEnvironment().timeout, std::chrono::seconds(1'000'000'000));
}

TEST(Config, UnknownVariablesWarn) {
  const Variable misspelt("TIDE_TIMOUT", "3");
  const auto warnings = ReadConfig().warnings;
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("TIDE_TIMOUT"), std::string::npos) << warnings[0];
}

}  // namespace
}  // namespace tide
