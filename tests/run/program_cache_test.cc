#include "run/program_cache.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "testing/checks.h"
#include "testing/ranks.h"
#include "tide/communicator.h"

namespace tide {
namespace {

using internal::kMostVariants;
using internal::PlannedProgram;
using internal::ProgramCache;

PlannedProgram Named(const std::string& name) {
  PlannedProgram planned;
  planned.program.name = name;
  return planned;
}

constexpr auto kMost = static_cast<int64_t>(kMostVariants);

TEST(ProgramCache, ForgetsTheLeastRecentlyUsedOfAGroup) {
  ProgramCache cache;
  for (int64_t i = 0; i < kMost; ++i) cache.Add({1, 7, i}, Named(std::to_string(i)));
  ASSERT_NE(cache.Find({1, 7, 0}), nullptr);  // now 1 is the oldest
  EXPECT_EQ(cache.Add({1, 7, kMost}, Named("new")).program.name, "new");
  EXPECT_EQ(cache.Find({1, 7, 1}), nullptr);
  for (int64_t i = 0; i <= kMost; ++i) {
    if (i == 1) continue;
    const PlannedProgram* found = cache.Find({1, 7, i});
    ASSERT_NE(found, nullptr) << i;
    EXPECT_EQ(found->program.name, i == kMost ? "new" : std::to_string(i));
  }
}

TEST(ProgramCache, GroupsAndCollectivesDoNotPushEachOtherOut) {
  ProgramCache cache;
  cache.Add({0}, Named("barrier"));
  cache.Add({1, 7}, Named("all_gather"));
  cache.Add({2, 8}, Named("other group"));
  for (int64_t i = 0; i < 2 * kMost; ++i) cache.Add({2, 7, i}, Named("reduce_scatter"));
  for (const std::vector<int64_t>& key : {std::vector<int64_t>{0}, {1, 7}, {2, 8}}) {
    EXPECT_NE(cache.Find(key), nullptr);
  }
  EXPECT_EQ(cache.Find({3, 7}), nullptr);
  cache.Clear();
  EXPECT_EQ(cache.Find({0}), nullptr);
}

// Every set of parameters with gradients is a program of its own; what is planned again is right.
TEST(ProgramCache, ManySetsOfParametersAreReducedInTurn) {
  constexpr int kParams = 7;
  constexpr int kSets = (1 << kParams) - 1;
  static_assert(kSets > 2 * static_cast<int>(kMostVariants));
  std::vector<ParamShape> shapes;
  for (int i = 0; i < kParams; ++i) {
    shapes.push_back({"p" + std::to_string(i), 4, 3, DType::kF32});
  }
  testing::RunCommunicators(2, {}, [&](Communicator& comm) {
    const int group = comm.RegisterGroup("experts", shapes);
    const GroupLayout& layout = comm.layout(group);
    const std::vector<DType> dtypes(kParams, DType::kF32);
    std::vector<std::vector<float>> gradients;
    for (int i = 0; i < kParams; ++i) {
      gradients.emplace_back(12, static_cast<float>(100 * i + 1 + comm.rank()));
    }
    for (int round = 0; round < 2; ++round) {
      for (int set = 1; set <= kSets; ++set) {
        ReduceScatterCall call;
        call.group = group;
        for (int i = 0; i < kParams; ++i) {
          if ((set >> i & 1) == 0) continue;
          call.params.push_back(i);
          call.gradients.push_back(gradients[static_cast<size_t>(i)].data());
          call.grad_dtypes.push_back(DType::kF32);
        }
        const auto elems = static_cast<size_t>(layout.params()[0].shard_elems);
        std::vector<float> output(elems * call.params.size());
        call.output = output.data();
        comm.ReduceScatter(call);
        for (size_t i = 0; i < output.size(); ++i) {
          const int param = call.params[i / elems];
          ASSERT_EQ(output[i], static_cast<float>(200 * param + 3)) << "set " << set;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tide
