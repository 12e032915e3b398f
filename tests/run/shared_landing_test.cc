// Node-shared landings: written once, but a rank's own changes stay its own. Every case runs also
// with sharing switched off, where the same must hold.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "testing/cases.h"
#include "testing/landings.h"
#include "testing/ranks.h"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide {
namespace {

using testing::AddLanding;
using testing::CanaryBytes;
using testing::Gather;
using testing::Gathered;
using testing::RunCommunicators;
using testing::ShapeCase;

void ForBoth(int ranks, const std::function<void(Communicator&)>& body) {
  for (const bool share : {true, false}) {
    CommunicatorOptions options;
    options.share_segments = share;
    RunCommunicators(ranks, options, body);
  }
}

bool Equal(const SegmentView& segment, const std::vector<char>& expected) {
  return std::memcmp(segment.address, expected.data(), expected.size()) == 0;
}

// Changes bytes of every parameter, its first and last among them, differently on every rank, in
// the segment and in `image`.
void Change(Communicator& comm, int group, const SegmentView& segment, std::mt19937& random,
            std::vector<char>* image) {
  const GroupLayout& layout = comm.layout(group);
  for (const ParamLayout& param : layout.params()) {
    const int64_t bytes = param.shard_bytes * layout.ranks();
    if (bytes == 0) continue;
    std::vector<int64_t> places = {0, bytes - 1};
    for (int i = 0; i < 5; ++i) places.push_back(static_cast<int64_t>(random()) % bytes);
    for (const int64_t place : places) {
      const int64_t at = CanaryBytes() + param.landing_offset + place;
      const auto value = static_cast<char>(0x70 + comm.rank());
      static_cast<char*>(segment.address)[at] = value;
      (*image)[static_cast<size_t>(at)] = value;
    }
  }
}

// Also pages of which the rank has changed one part and the next all-gather writes another.
TEST(SharedLanding, AChangeIsSeenByItsRankAloneUntilTheNextAllGather) {
  for (const int ranks : {1, 2, 5}) {
    ForBoth(ranks, [](Communicator& comm) {
      std::mt19937 random(31 + static_cast<unsigned>(comm.rank()));
      for (const ShapeCase& shape : testing::ShapeCases()) {
        const int group = comm.RegisterGroup(shape.name, testing::MakeShapes(shape, DType::kBF16));
        const SegmentView segment = AddLanding(comm, group, SegmentKind::kNodeShared);
        for (const unsigned seed : {100U, 200U, 300U}) {
          Gather(comm, group, segment, seed);
          auto image = Gathered(comm.layout(group), DType::kBF16, segment, seed);
          ASSERT_TRUE(Equal(segment, image)) << shape.name << ", all-gather " << seed;
          // Some ranks change nothing.
          if (comm.rank() % 3 != 2) Change(comm, group, segment, random, &image);
          comm.Barrier();
          ASSERT_TRUE(Equal(segment, image)) << shape.name << ", change " << seed;
          comm.Barrier();
        }
      }
    });
  }
}

// Larger than what one read of pagemap covers, with all pages changed.
TEST(SharedLanding, ALargeLandingThatWasChangedAllOver) {
  RunCommunicators(2, {}, [](Communicator& comm) {
    const ShapeCase shape{"large", {2, 2 * 9000}, 512};
    const int group = comm.RegisterGroup("large", testing::MakeShapes(shape, DType::kU8));
    const SegmentView segment = AddLanding(comm, group, SegmentKind::kNodeShared);
    Gather(comm, group, segment, 1);
    std::memset(static_cast<char*>(segment.address) + CanaryBytes(), comm.rank(),
                static_cast<size_t>(comm.layout(group).landing_bytes()));
    Gather(comm, group, segment, 2);
    EXPECT_TRUE(Equal(segment, Gathered(comm.layout(group), DType::kU8, segment, 2)));
    comm.Barrier();
  });
}

// A program may lock its memory after set-up (mlockall): every page of a private mapping is then an
// own copy.
TEST(SharedLanding, LockedInMemoryAfterSetUp) {
  ForBoth(2, [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", {{"p", 2000, 5, DType::kF32}});
    const SegmentView segment = AddLanding(comm, group, SegmentKind::kNodeShared);
    ASSERT_EQ(mlock(segment.address, static_cast<size_t>(segment.bytes)), 0);
    for (const unsigned seed : {1U, 2U}) {
      Gather(comm, group, segment, seed);
      EXPECT_TRUE(Equal(segment, Gathered(comm.layout(group), DType::kF32, segment, seed)));
      std::memset(static_cast<char*>(segment.address) + CanaryBytes(), comm.rank(), 100);
      comm.Barrier();
    }
  });
}

TEST(SharedLanding, AnAllGatherLeavesTheOtherLandingsChangesAlone) {
  ForBoth(3, [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", {{"p", 9, 5, DType::kF32}});
    const int64_t page = CanaryBytes();
    const SegmentView segment = comm.AddSegment(3 * page, "landings", SegmentKind::kNodeShared);
    auto* bytes = static_cast<char*>(segment.address);
    for (const int64_t place : {int64_t{5}, 2 * page + 5}) bytes[place] = 7;
    Gather(comm, group, segment, 1);  // into the second page
    EXPECT_EQ(bytes[5], 7);
    EXPECT_EQ(bytes[2 * page + 5], 7);
    comm.Barrier();
  });
}

TEST(SharedLanding, OutlivesItsCommunicatorWithTheChanges) {
  for (const bool share : {true, false}) {
    CommunicatorOptions options;
    options.share_segments = share;
    testing::RunRanks(3, [&](Bootstrap& bootstrap) {
      SegmentView segment;
      std::vector<char> image;
      {
        Communicator comm(bootstrap, options);
        const int group = comm.RegisterGroup("g", {{"p", 900, 5, DType::kF32}});
        segment = AddLanding(comm, group, SegmentKind::kNodeShared);
        Gather(comm, group, segment, 1);
        image = Gathered(comm.layout(group), DType::kF32, segment, 1);
        std::mt19937 random(5);
        Change(comm, group, segment, random, &image);
      }
      bootstrap.AllGather("");  // all communicators are gone
      EXPECT_TRUE(Equal(segment, image));
    });
  }
}

TEST(SharedLanding, StartsAtAPage) {
  RunCommunicators(2, {}, [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", {{"p", 2, 1, DType::kF32}});
    const SegmentView segment = comm.AddSegment(4096, "landing", SegmentKind::kNodeShared);
    if (segment.kind != SegmentKind::kNodeShared) return;
    const float shard = 1;
    try {
      comm.AllGather({group, {&shard}, {DType::kF32}, {segment.id, 256}});
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    }
    comm.Barrier();
  });
}

TEST(SharedLanding, TheKindIsWhatAllRanksCanDo) {
  const auto check = [](Communicator& comm, bool wanted) {
    const SegmentView segment = comm.AddSegment(4096, "landing", SegmentKind::kNodeShared);
    const bool shared = segment.kind == SegmentKind::kNodeShared;
    EXPECT_EQ(shared, comm.unshared_reason().empty());
    if (!wanted) {
      EXPECT_EQ(comm.unshared_reason(), "rank 1: switched off");
    }
    EXPECT_EQ(comm.AddSegment(4096, "staging").kind, SegmentKind::kPerRank);
  };
  RunCommunicators(3, {}, [&](Communicator& comm) { check(comm, true); });
  testing::RunRanks(3, [&](Bootstrap& bootstrap) {
    CommunicatorOptions options;
    options.share_segments = bootstrap.rank() != 1;
    Communicator comm(bootstrap, options);
    check(comm, false);
  });
}

TEST(SharedLanding, DifferentKindsAreAMismatch) {
  RunCommunicators(2, {}, [](Communicator& comm) {
    if (!comm.unshared_reason().empty()) return;
    const auto kind = comm.rank() == 0 ? SegmentKind::kNodeShared : SegmentKind::kPerRank;
    try {
      comm.AddSegment(4096, "landing", kind);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
      EXPECT_NE(std::string(error.what()).find("(node-shared), rank 1"), std::string::npos)
          << error.what();
    }
  });
}

TEST(SharedLanding, IsCountedOnceANode) {
  CommunicatorOptions options;
  options.memory_limit_bytes = 20 << 20;
  RunCommunicators(3, options, [](Communicator& comm) {
    if (!comm.unshared_reason().empty()) return;
    EXPECT_THROW(comm.AddSegment(12 << 20, "landing", SegmentKind::kPerRank), Error);
    comm.AddSegment(12 << 20, "landing", SegmentKind::kNodeShared);
    try {
      comm.AddSegment(21 << 20, "landing", SegmentKind::kNodeShared);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_NE(std::string(error.what()).find("21 MiB, shared by 3 ranks"), std::string::npos)
          << error.what();
    }
    comm.Barrier();
  });
}

}  // namespace
}  // namespace tide
