// When the nccl fabric has multicast, and what it says where it has none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "fabric/nccl/fake.h"
#include "fabric/nccl/nccl_fabric.h"
#include "testing/ranks.h"
#include "tide/error.h"

namespace tide {
namespace {

using testing::FakeParts;
using testing::FakeTraits;
using testing::FakeWorld;
using testing::Order;
using testing::RunRanks;

constexpr int kRanks = 4;

struct Outcome {
  std::set<std::string> reasons;  // of all ranks
  std::set<std::string> errors;
  std::set<ErrorCode> codes;
  int objects = 0;  // FakeCalls::multicast_objects, of all ranks

  std::string reason() const { return reasons.size() == 1 ? *reasons.begin() : "they differ"; }
};

// Makes fabrics of two nodes of two ranks with one more segment each, in a world where multicast is
// there but for what `lack` takes away.
Outcome Make(const std::function<void(FakeWorld&)>& lack, int nodes = 2, bool wanted = true) {
  const auto world = std::make_shared<FakeWorld>(kRanks, 1, Order::kStreams);
  AllowMulticast(*world, kRanks / 2);
  lack(*world);
  Outcome outcome;
  std::mutex mutex;
  RunRanks(kRanks, [&](Bootstrap& bootstrap) {
    CommunicatorOptions options;
    options.nodes = nodes;
    options.multicast = wanted;
    try {
      nccl::NcclFabric fabric(bootstrap, options, FakeParts(world, bootstrap.rank()));
      fabric.AddSegment(1 << 20, "landing", SegmentKind::kPerRank);
      const std::lock_guard lock(mutex);
      outcome.reasons.insert(fabric.unicast_reason());
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      outcome.errors.insert(error.what());
      outcome.codes.insert(error.code());
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) outcome.objects += world->calls(rank).multicast_objects;
  return outcome;
}

std::function<void(FakeWorld&)> From(int first, const std::function<void(FakeTraits&)>& lack) {
  return [first, lack](FakeWorld& world) {
    for (int rank = first; rank < kRanks; ++rank) lack(world.traits(rank));
  };
}

void ExpectMismatch(const Outcome& outcome, const std::string& text) {
  EXPECT_TRUE(outcome.reasons.empty());
  EXPECT_EQ(outcome.codes, std::set<ErrorCode>{ErrorCode::kMismatch});
  ASSERT_EQ(outcome.errors.size(), 1U);
  EXPECT_NE(outcome.errors.begin()->find(text), std::string::npos) << *outcome.errors.begin();
}

TEST(NcclMulticastCapability, IsThere) {
  const Outcome outcome = Make([](FakeWorld&) {});
  EXPECT_EQ(outcome.reason(), "");
  EXPECT_EQ(outcome.objects, kRanks * 3);  // the parent, the counters, the segment
}

TEST(NcclMulticastCapability, OnlyIfAskedFor) {
  const Outcome outcome = Make([](FakeWorld&) {}, 2, false);
  EXPECT_EQ(outcome.reason(),
            "multicast inside a node: off by default; TIDE_MULTICAST=on asks for it");
  EXPECT_EQ(outcome.objects, 0);
}

TEST(NcclMulticastCapability, EitherVariableForbidsEveryObject) {
  for (const auto& [name, value] :
       {std::pair("NCCL_NVLS_ENABLE", "0"), std::pair("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")}) {
    const Outcome outcome =
        Make([name = name, value = value](FakeWorld&) { setenv(name, value, 1); });
    unsetenv(name);
    EXPECT_EQ(outcome.objects, 0) << name;
    EXPECT_EQ(outcome.reason(),
              std::string("multicast inside a node: switched off by ") + name + "=" + value);
  }
}

TEST(NcclMulticastCapability, OtherValuesForbidNothing) {
  const Outcome outcome = Make([](FakeWorld&) {
    setenv("NCCL_NVLS_ENABLE", "1", 1);
    setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", 1);
  });
  unsetenv("NCCL_NVLS_ENABLE");
  unsetenv("TORCH_SYMM_MEM_DISABLE_MULTICAST");
  EXPECT_EQ(outcome.reason(), "");
}

TEST(NcclMulticastCapability, NcclHasNone) {
  const auto lack = [](FakeTraits& traits) { traits.multimem = false; };
  EXPECT_EQ(Make(From(0, lack)).reason(), "multicast inside a node: fake NCCL has none here");
  ExpectMismatch(Make(From(3, lack)), "1 of 4 ranks can't, first rank 3: fake NCCL has none here");
}

TEST(NcclMulticastCapability, NcclGivesNoAddress) {
  const auto lack = [](FakeTraits& traits) { traits.multicast_pointers = false; };
  EXPECT_EQ(Make(From(0, lack)).reason(),
            "multicast inside a node: NCCL gives a segment no multicast address; "
            "NCCL_NVLS_ENABLE=0 does without");
  ExpectMismatch(Make(From(2, lack)), "2 of 4 ranks can't, first rank 2");
}

// An address of NCCL's is for all that reach each other: more than a virtual node.
TEST(NcclMulticastCapability, NotAcrossVirtualNodes) {
  const auto lack = [](FakeTraits& traits) { traits.lsa_teams = 1; };
  EXPECT_EQ(Make(From(0, lack)).reason(),
            "multicast inside a node: it spans 4 ranks, a virtual node has 2");
}

TEST(NcclMulticastCapability, NothingToReach) {
  EXPECT_EQ(Make([](FakeWorld&) {}, kRanks).reason(),
            "multicast inside a node: a node has one rank");
}

}  // namespace
}  // namespace tide
