#include "tide/verify.h"

#include <gtest/gtest.h>

#include "verify/setups.h"

namespace tide {
namespace {

TEST(Verify, AllGather) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const DType shard : {DType::kBF16, DType::kF32}) {
      const VerifySetup setup = testing::MakeSetup({1, ranks}, shard, DType::kBF16, 0, 1);
      const VerifyResult result = VerifyAllGather(setup, {});
      EXPECT_TRUE(result.ok()) << ranks << "\n" << ToText(result);
    }
  }
}

TEST(Verify, ReduceScatter) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const VerifySetup setup = testing::MakeSetup({1, ranks}, DType::kBF16, DType::kBF16, 0, 1);
    const VerifyResult result = VerifyReduceScatter(setup, {});
    EXPECT_TRUE(result.ok()) << ranks << "\n" << ToText(result);
  }
}

}  // namespace
}  // namespace tide
