// What goes wrong between ranks, and what each of them hears.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "testing/ranks.h"
#include "tide/communicator.h"
#include "tide/error.h"

namespace tide {
namespace {

using testing::RunCommunicators;

CommunicatorOptions Timeout(double seconds) {
  CommunicatorOptions options;
  options.timeout =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
  return options;
}

// Runs the body on all ranks and returns the error of each.
std::vector<Error> Errors(int world, const CommunicatorOptions& options,
                          const std::function<void(Communicator&)>& body) {
  std::vector<Error> errors(static_cast<size_t>(world), Error(ErrorCode::kInternal, "no error"));
  RunCommunicators(world, options, [&](Communicator& comm) {
    try {
      body(comm);
    } catch (const Error& error) {
      errors[static_cast<size_t>(comm.rank())] = error;
    }
  });
  return errors;
}

void ReduceOne(Communicator& comm, int group, int param) {
  const std::vector<float> gradient(8, 1.0F);
  std::vector<float> output(8, -1.0F);
  comm.ReduceScatter(
      {group, {param}, {gradient.data()}, {DType::kF32}, output.data(), DType::kF32, 1.0F, false});
}

std::vector<ParamShape> TwoParams() { return {{"a", 4, 1, DType::kF32}, {"b", 4, 1, DType::kF32}}; }

TEST(Mismatch, DifferentParametersAreNamed) {
  const auto errors = Errors(3, Timeout(10), [](Communicator& comm) {
    const int group = comm.RegisterGroup("layers.3", TwoParams());
    ReduceOne(comm, group, comm.rank() == 1 ? 1 : 0);
  });
  for (const Error& error : errors) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
    EXPECT_NE(std::string(error.what()).find("only rank 1 has a gradient of 'b'"),
              std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("layers.3"), std::string::npos);
  }
}

TEST(Mismatch, DifferentOperationsAreNamed) {
  const auto errors = Errors(3, Timeout(10), [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", TwoParams());
    const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
    comm.Reserve({{group, {0, 1}, {DType::kF32, DType::kF32}}});
    const float shard[4] = {};
    if (comm.rank() == 2) {
      ReduceOne(comm, group, 0);
    } else {
      comm.AllGather({group, {shard, shard}, {DType::kF32, DType::kF32}, {landing.id, 0}});
    }
  });
  for (const Error& error : errors) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
    EXPECT_NE(std::string(error.what()).find("all_gather of group 'g'"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("reduce_scatter of group 'g'"), std::string::npos)
        << error.what();
  }
}

TEST(Mismatch, OneRankThatRefreshesIsNamed) {
  const auto errors = Errors(2, Timeout(10), [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", TwoParams());
    const SegmentView landing = comm.AddSegment(comm.layout(group).landing_bytes(), "landing");
    const float shard[4] = {};
    AllGatherCall call{group, {shard, shard}, {DType::kF32, DType::kF32}, {landing.id, 0}};
    comm.AllGather(call);
    call.refresh = comm.rank() == 0;
    comm.AllGather(call);
  });
  for (const Error& error : errors) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
    const std::string text = error.what();
    for (const char* part :
         {"entered refreshing all_gather of group 'g'",
          "only rank 1 gathers what its forward has gathered already", "TIDE_KEEP_LANDINGS=off"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

void CheckDifferentLandingSlots(SegmentKind kind) {
  const auto errors = Errors(2, Timeout(10), [kind](Communicator& comm) {
    const int group = comm.RegisterGroup("g", TwoParams());
    const int64_t page = sysconf(_SC_PAGESIZE);
    const SegmentView landing = comm.AddSegment(2 * page, "landing", kind);
    const float shard[4] = {1, 1, 1, 1};
    const int64_t offset = comm.rank() * page;
    try {
      comm.AllGather({group, {shard, shard}, {DType::kF32, DType::kF32}, {landing.id, offset}});
    } catch (const Error&) {
      const auto* bytes = static_cast<const char*>(landing.address);
      for (int64_t i = 0; i < landing.bytes; ++i) EXPECT_EQ(bytes[i], 0);
      throw;
    }
  });
  for (const Error& error : errors) EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
}

TEST(Mismatch, DifferentLandingSlotsNeverExchangeBytes) {
  CheckDifferentLandingSlots(SegmentKind::kPerRank);
  CheckDifferentLandingSlots(SegmentKind::kNodeShared);
}

TEST(Timeout, NamesTheRankThatDoesNotCome) {
  const auto errors = Errors(3, Timeout(0.3), [](Communicator& comm) {
    comm.Barrier();
    if (comm.rank() == 1) {
      // Longer than the deadline under test.
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      return;
    }
    comm.Barrier();
  });
  for (const int rank : {0, 2}) {
    const Error& error = errors[static_cast<size_t>(rank)];
    EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
    EXPECT_EQ(error.context().peer, 1);
    EXPECT_NE(std::string(error.what()).find("for rank 1"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("last entered call 1"), std::string::npos)
        << error.what();
  }
}

TEST(PeerGone, IsNoticedLongBeforeTheDeadline) {
  const auto errors = Errors(3, Timeout(60), [](Communicator& comm) {
    comm.Barrier();
    if (comm.rank() != 2) comm.Barrier();
  });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(errors[static_cast<size_t>(rank)].code(), ErrorCode::kPeerDead)
        << errors[static_cast<size_t>(rank)].what();
    EXPECT_EQ(errors[static_cast<size_t>(rank)].context().peer, 2);
  }
}

TEST(Poison, LaterCallsSayWhatHappened) {
  RunCommunicators(2, Timeout(10), [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", TwoParams());
    EXPECT_THROW(ReduceOne(comm, group, comm.rank()), Error);
    try {
      comm.Barrier();
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kPoisoned);
    }
  });
}

TEST(Memory, TooLittleIsTheSameErrorEverywhere) {
  const auto errors = Errors(
      3, Timeout(10), [](Communicator& comm) { comm.AddSegment(int64_t{1} << 46, "landing"); });
  for (const Error& error : errors) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_STREQ(error.what(), errors[0].what());
    EXPECT_NE(std::string(error.what()).find("landing needs"), std::string::npos) << error.what();
  }
}

TEST(Memory, TheCommunicatorSurvivesARefusedSegment) {
  RunCommunicators(2, Timeout(10), [](Communicator& comm) {
    EXPECT_THROW(comm.AddSegment(int64_t{1} << 46, "landing"), Error);
    EXPECT_THROW(comm.AddSegment(comm.rank() == 0 ? 4096 : 8192, "landing"), Error);
    comm.AddSegment(4096, "landing");
    comm.Barrier();
  });
}

TEST(Memory, ASegmentOutlivesItsCommunicator) {
  std::mutex mutex;
  std::vector<SegmentView> segments;
  RunCommunicators(2, Timeout(10), [&](Communicator& comm) {
    SegmentView segment = comm.AddSegment(4096, "landing");
    static_cast<char*>(segment.address)[0] = static_cast<char>(comm.rank() + 1);
    const std::lock_guard<std::mutex> lock(mutex);
    segments.push_back(segment);
  });
  EXPECT_EQ(static_cast<char*>(segments[0].address)[0] + static_cast<char*>(segments[1].address)[0],
            3);
}

TEST(BadInput, NodesThatDoNotDivideTheRanks) {
  CommunicatorOptions options = Timeout(10);
  options.nodes = 2;
  std::atomic<int> refused = 0;
  testing::RunRanks(3, [&](Bootstrap& bootstrap) {
    try {
      const Communicator comm(bootstrap, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_STREQ(
          error.what(),
          "nodes: expected a divisor of 3 ranks, so that all nodes have as many ranks, got "
          "2");
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

TEST(BadInput, IsRefusedBeforeAnythingMoves) {
  RunCommunicators(2, Timeout(10), [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", TwoParams());
    const SegmentView landing = comm.AddSegment(64, "too small");
    const float shard[4] = {};
    EXPECT_THROW(
        comm.AllGather({group, {shard, shard}, {DType::kF32, DType::kF32}, {landing.id, 0}}),
        Error);
    EXPECT_THROW(comm.AllGather({group, {shard}, {DType::kF32}, {landing.id, 0}}), Error);
    EXPECT_THROW(comm.AllGather({group + 1, {}, {}, {landing.id, 0}}), Error);
    EXPECT_THROW(
        comm.ReduceScatter({group, {0}, {}, {DType::kF32}, nullptr, DType::kF32, 1, false}), Error);
    EXPECT_THROW(
        comm.ReduceScatter({group, {0}, {shard}, {DType::kF32}, nullptr, DType::kF32, 1, false}),
        Error);
    comm.Barrier();
  });
}

// On several nodes calls alternate between two banks; a refused one takes none.
TEST(BadInput, ARefusedReduceScatterChangesNothing) {
  CommunicatorOptions options = Timeout(10);
  options.nodes = 2;
  RunCommunicators(4, options, [](Communicator& comm) {
    const int group = comm.RegisterGroup("g", TwoParams());
    ReduceOne(comm, group, 0);
    if (comm.rank() == 0) {
      EXPECT_THROW(ReduceOne(comm, group, 7), Error);
    }
    ReduceOne(comm, group, 1);
  });
}

TEST(BadInput, ResidentShardsAreForPlanningAlone) {
  CommunicatorOptions options = Timeout(10);
  options.all_gather.resident = true;
  EXPECT_THROW(RunCommunicators(2, options, [](Communicator&) {}), Error);
}

}  // namespace
}  // namespace tide
