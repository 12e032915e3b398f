// CommunicatorOptions::memory_limit_bytes: a bound on the sum of what communicators hold.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "testing/ranks.h"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide {
namespace {

using testing::RunRanks;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kRanks = 2;

// Threads are the ranks here, so each counts for itself, as a process would.
CommunicatorOptions OptionsOfRank() {
  CommunicatorOptions options;
  options.memory_limit_bytes = 20 * kMiB;
  options.reserved_bytes = std::make_shared<ReservedBytes>(0);
  return options;
}

SegmentView Add(Communicator& comm, int64_t bytes) {
  return comm.AddSegment(bytes, "landing", SegmentKind::kPerRank);
}

void ExpectRefusal(Communicator& comm, int64_t bytes, const std::vector<std::string>& words) {
  try {
    Add(comm, bytes);
    ADD_FAILURE() << "expected no room for " << bytes;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

TEST(MemoryLimit, IsOfTheSum) {
  RunRanks(kRanks, [](Bootstrap& bootstrap) {
    CommunicatorOptions options = OptionsOfRank();
    options.reserved_bytes = nullptr;
    const auto comm = std::make_unique<Communicator>(bootstrap, options);
    Add(*comm, 6 * kMiB);
    ExpectRefusal(*comm, 5 * kMiB,
                  {"landing needs 5 MiB on each of 2 ranks, 10 MiB in all, but only 8 MiB",
                   "TIDE_MEMORY_LIMIT: 20 MiB, of which 12 MiB is reserved"});
    Add(*comm, 3 * kMiB);
    comm->Barrier();
  });
}

TEST(MemoryLimit, CommunicatorsCountTogether) {
  RunRanks(kRanks, [](Bootstrap& bootstrap) {
    const CommunicatorOptions options = OptionsOfRank();
    const auto dense = std::make_unique<Communicator>(bootstrap, options);
    const auto experts = std::make_unique<Communicator>(bootstrap, options);
    Add(*dense, 6 * kMiB);
    ExpectRefusal(*experts, 5 * kMiB, {"20 MiB, of which 12"});
    const auto alone = std::make_unique<Communicator>(bootstrap, OptionsOfRank());
    Add(*alone, 5 * kMiB);
    alone->Barrier();
  });
}

TEST(MemoryLimit, IsFreeAgainWithTheLastView) {
  RunRanks(kRanks, [](Bootstrap& bootstrap) {
    const CommunicatorOptions options = OptionsOfRank();
    auto first = std::make_unique<Communicator>(bootstrap, options);
    SegmentView view = Add(*first, 6 * kMiB);
    first.reset();  // a tensor lives on
    EXPECT_GE(options.reserved_bytes->load(), 12 * kMiB);
    {
      const auto second = std::make_unique<Communicator>(bootstrap, options);
      ExpectRefusal(*second, 5 * kMiB, {});
      view = {};
      Add(*second, 5 * kMiB);
      second->Barrier();
    }
    EXPECT_EQ(options.reserved_bytes->load(), 0);
  });
}

}  // namespace
}  // namespace tide
