// Both collectives on the nccl fabric, over the fake: random order of streams, ranks as threads.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "fabric/nccl/fake.h"
#include "fabric/nccl/nccl_fabric.h"
#include "fabric/nccl/test_bed.h"
#include "testing/ranks.h"

namespace tide {
namespace {

using nccl::Reach;
using testing::CoveringRow;
using testing::FakeParts;
using testing::FakeWorld;
using testing::kCoveringRows;
using testing::Order;
using testing::PlanChoice;
using testing::RandomCase;

class FakeBed final : public testing::TestBed {
 public:
  FakeBed(const std::shared_ptr<FakeWorld>& world, int rank)
      : device_(FakeParts(world, rank)().device) {
    stream_ = device_->CreateStream();
    event_ = device_->CreateEvent();
  }
  ~FakeBed() override { device_->DestroyEvent(event_); }
  char* Allocate(int64_t bytes) override {
    memory_.push_back(std::make_unique<std::vector<char>>(static_cast<size_t>(bytes) + 1));
    return memory_.back()->data();
  }
  void Upload(void* device, const std::vector<char>& host) override {
    std::copy(host.begin(), host.end(), static_cast<char*>(device));
  }
  std::vector<char> Download(const void* device, int64_t bytes) override {
    const auto* from = static_cast<const char*>(device);
    return {from, from + bytes};
  }
  void* stream() override { return stream_; }
  void Synchronise() override {
    device_->Record(event_, stream_);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!device_->Finished(event_)) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("stuck");
      std::this_thread::yield();
    }
  }

 private:
  std::unique_ptr<nccl::Device> device_;
  nccl::Stream stream_;
  nccl::EventHandle event_;
  std::vector<std::unique_ptr<std::vector<char>>> memory_;
};

PlanChoice Choice(unsigned seed) { return CoveringRow(static_cast<int>(seed) % kCoveringRows); }

void CheckLayout(const Topology& topology, unsigned seed, Order order, const PlanChoice& choice,
                 Reach reach) {
  SCOPED_TRACE(::testing::Message() << topology.nodes << " x " << topology.local_ranks << ", seed "
                                    << seed << (order == Order::kOneQueue ? ", one queue" : "")
                                    << ", n_part " << choice.passes << ", k " << choice.round_width
                                    << ", " << Name(choice.mode) << ", " << Name(choice.placement));
  const RandomCase made = testing::MakeRandomCase(seed, 20);
  const CommunicatorOptions options = testing::MakeOptions(topology, choice, seed);
  const GroupLayout layout("g", made.shapes, topology.Ranks());
  const testing::ReductionReference reference(layout, topology, options.reduce_scatter,
                                              made.grad_dtypes);
  const testing::LayoutCase layout_case{made, reference,
                                        seed % 2 == 0 ? DType::kBF16 : DType::kF32};
  const auto world = std::make_shared<FakeWorld>(topology.Ranks(), seed, order);
  if (reach == Reach::kMulticast) AllowMulticast(*world, topology.local_ranks);
  testing::RunRanks(topology.Ranks(), [&](Bootstrap& bootstrap) {
    FakeBed bed(world, bootstrap.rank());
    Communicator comm(
        std::make_unique<nccl::NcclFabric>(bootstrap, options, FakeParts(world, bootstrap.rank())),
        options);
    EXPECT_EQ(comm.unicast_reason().empty(), reach == Reach::kMulticast) << comm.unicast_reason();
    testing::RankCheck(comm, bed, layout_case).Run();
  });
}

class NcclCollectives : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  Topology topology() const { return {GetParam().first, GetParam().second}; }
  unsigned Seed(int i) const {
    return static_cast<unsigned>(1000 * topology().nodes + 100 * topology().local_ranks + i);
  }
};

TEST_P(NcclCollectives, RandomLayouts) {
  for (int i = 0; i < 4 && !HasFailure(); ++i) {
    CheckLayout(topology(), Seed(i), Order::kStreams, Choice(Seed(i)), Reach::kUnicast);
  }
}

TEST_P(NcclCollectives, OneHardwareQueue) {
  for (int i = 4; i < 6 && !HasFailure(); ++i) {
    CheckLayout(topology(), Seed(i), Order::kOneQueue, Choice(Seed(i)), Reach::kUnicast);
  }
}

INSTANTIATE_TEST_SUITE_P(UpToEightRanks, NcclCollectives,
                         ::testing::ValuesIn(testing::TopologiesUpTo(8)), testing::TopologyName);

// A wave of eight ranks adds at most two partials: the order of the switch does not show.
class NcclMulticast : public NcclCollectives {};

TEST_P(NcclMulticast, RandomLayouts) {
  PlanChoice choice = Choice(Seed(6));
  choice.placement = Placement::kLatinSquare;
  CheckLayout(topology(), Seed(6), Order::kStreams, choice, Reach::kMulticast);
  if (HasFailure()) return;
  CheckLayout(topology(), Seed(7), Order::kOneQueue, Choice(Seed(7)), Reach::kMulticast);
}

INSTANTIATE_TEST_SUITE_P(UpToEightRanks, NcclMulticast,
                         ::testing::ValuesIn(testing::NodesOfSeveral(8)), testing::TopologyName);

}  // namespace
}  // namespace tide
