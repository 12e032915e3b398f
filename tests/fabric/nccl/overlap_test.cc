// Calls of both lanes under way at once, as FSDP2 enqueues them, while hosts and streams are held
// back at random: whatever the program does not order happens in other orders, and no result may
// change.
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fabric/nccl/drive.h"
#include "fabric/nccl/fake.h"
#include "fabric/nccl/nccl_fabric.h"
#include "fabric/nccl/test_bed.h"
#include "fabric/nccl/training.h"

namespace tide {
namespace {

using nccl::Reach;
using testing::FakeParts;
using testing::FakeWorld;
using testing::Order;
using testing::TrainedModel;
using testing::TrainingRank;

struct Trained {
  bool ended = false;
  std::vector<std::string> differences;
};

Trained Train(const TrainedModel& model, const Topology& topology, unsigned seed, Order order,
              const std::set<int>& late, const std::string& forgotten = "",
              Reach reach = Reach::kUnicast) {
  const auto world = std::make_shared<FakeWorld>(topology.Ranks(), seed, order);
  if (reach == Reach::kMulticast) AllowMulticast(*world, topology.local_ranks);
  std::vector<testing::Host> hosts(static_cast<size_t>(topology.Ranks()));
  Trained trained;
  const testing::Meeting meet([&] {
    trained.ended = Drive(*world, hosts, seed, late);
    // Streams that wait for ever would keep the communicators from ending.
    trained.ended ? world->EndDrive() : world->Abandon();
  });
  std::mutex mutex;
  testing::RunRanks(topology.Ranks(), [&](Bootstrap& bootstrap) {
    Communicator comm(std::make_unique<nccl::NcclFabric>(bootstrap, model.options,
                                                         FakeParts(world, bootstrap.rank())),
                      model.options);
    EXPECT_EQ(comm.unicast_reason().empty(), reach == Reach::kMulticast) << comm.unicast_reason();
    TrainingRank rank(world, comm, model, forgotten);
    hosts[static_cast<size_t>(bootstrap.rank())] = [&rank] { return rank.Next(); };
    meet(bootstrap);
    const std::lock_guard lock(mutex);
    trained.differences.insert(trained.differences.end(), rank.differences.begin(),
                               rank.differences.end());
  });
  return trained;
}

class Overlap : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  Topology topology() const { return {GetParam().first, GetParam().second}; }

  // Several schedules of one model, in every order; in some a rank is always late.
  void Check(unsigned seed, int schedules, Reach reach = Reach::kUnicast) const {
    const TrainedModel model(topology(), seed);
    SCOPED_TRACE(::testing::Message()
                 << topology().nodes << " x " << topology().local_ranks << ", seed " << seed
                 << ", n_part " << model.choice.passes << ", k " << model.choice.round_width << ", "
                 << Name(model.choice.mode) << ", " << Name(model.choice.placement));
    for (const Order order : {Order::kStreams, Order::kUnordered, Order::kOneQueue}) {
      for (int i = 0; i < schedules; ++i) {
        std::set<int> late;
        if (i % 3 == 1) late.insert(static_cast<int>(seed) % topology().Ranks());
        const unsigned schedule = 1000 * seed + static_cast<unsigned>(i);
        const Trained trained = Train(model, topology(), schedule, order, late, "", reach);
        SCOPED_TRACE(::testing::Message()
                     << "schedule " << schedule << ", order " << static_cast<int>(order));
        ASSERT_TRUE(trained.ended) << "nothing moves any more";
        ASSERT_EQ(trained.differences, std::vector<std::string>());
      }
    }
  }
};

TEST_P(Overlap, ChangesNoResult) {
  for (unsigned seed = 0; seed < 4 && !HasFailure(); ++seed) Check(seed, 2);
}

TEST_P(Overlap, ChangesNoResultSlow) {
  for (unsigned seed = 100; seed < 112 && !HasFailure(); ++seed) Check(seed, 6);
}

// The schedules find what nobody orders: a program that forgets one kind of event is seen.
TEST(Overlapping, ShowsWhatTheCallerDoesNotOrder) {
  const Topology topology{2, 2};
  const TrainedModel model(topology, 1);
  for (const char* event : {"updated", "gathered", "vacated", "gradients", "reduced"}) {
    bool seen = false;
    for (unsigned seed = 0; seed < 1000 && !seen; ++seed) {
      const Trained trained = Train(model, topology, seed, Order::kStreams, {}, event);
      EXPECT_TRUE(trained.ended) << event;
      seen = !trained.differences.empty();
    }
    EXPECT_TRUE(seen) << "nobody awaits '" << event << "', and no schedule shows it";
  }
}

INSTANTIATE_TEST_SUITE_P(UpToEightRanks, Overlap, ::testing::ValuesIn(testing::TopologiesUpTo(8)),
                         testing::TopologyName);

class MulticastOverlap : public Overlap {};

// Reduces in a latin square.
TEST_P(MulticastOverlap, ChangesNoResult) { Check(4, 2, Reach::kMulticast); }

TEST_P(MulticastOverlap, ChangesNoResultSlow) {
  for (unsigned seed = 100; seed < 106 && !HasFailure(); ++seed) Check(seed, 6, Reach::kMulticast);
}

INSTANTIATE_TEST_SUITE_P(UpToEightRanks, MulticastOverlap,
                         ::testing::ValuesIn(testing::NodesOfSeveral(8)), testing::TopologyName);

}  // namespace
}  // namespace tide
