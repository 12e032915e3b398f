// One body of tests for both: the fake and a GPU.
#ifndef TIDE_TESTS_FABRIC_NCCL_TEST_BED_H_
#define TIDE_TESTS_FABRIC_NCCL_TEST_BED_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "testing/cases.h"
#include "testing/checks.h"
#include "testing/landings.h"
#include "testing/random_case.h"
#include "tide/communicator.h"

namespace tide::testing {

// Memory and a stream of one rank, freed at its end.
class TestBed {
 public:
  virtual ~TestBed() = default;
  virtual char* Allocate(int64_t bytes) = 0;
  // Block.
  virtual void Upload(void* device, const std::vector<char>& host) = 0;
  virtual std::vector<char> Download(const void* device, int64_t bytes) = 0;
  virtual void* stream() = 0;
  virtual void Synchronise() = 0;

  char* Copy(const std::vector<char>& host) {
    char* device = Allocate(static_cast<int64_t>(host.size()));
    Upload(device, host);
    return device;
  }
  std::vector<const void*> Copies(const std::vector<std::vector<char>>& hosts) {
    std::vector<const void*> devices;
    for (const auto& host : hosts) devices.push_back(Copy(host));
    return devices;
  }
};

// A group and what is asked of it, as every rank sees it.
struct LayoutCase {
  const RandomCase& made;
  const ReductionReference& reference;
  DType shard_dtype = DType::kBF16;
};

// (M, L) with at most this many ranks.
inline std::vector<std::pair<int, int>> TopologiesUpTo(int ranks) {
  std::vector<std::pair<int, int>> all;
  for (int nodes = 1; nodes <= ranks; ++nodes) {
    for (int locals = 1; nodes * locals <= ranks; ++locals) all.emplace_back(nodes, locals);
  }
  return all;
}

// Those of nodes with several ranks.
inline std::vector<std::pair<int, int>> NodesOfSeveral(int ranks) {
  auto all = TopologiesUpTo(ranks);
  std::erase_if(all, [](const auto& topology) { return topology.second == 1; });
  return all;
}

inline std::string TopologyName(const ::testing::TestParamInfo<std::pair<int, int>>& topology) {
  return std::to_string(topology.param.first) + "x" + std::to_string(topology.param.second);
}

// Gathers twice into two landings, on one node refreshes the second, and reduces twice, the second
// time into the first output, without waiting in between; then looks at all results.
class RankCheck {
 public:
  RankCheck(Communicator& comm, TestBed& bed, const LayoutCase& layout)
      : comm_(comm), bed_(bed), case_(layout) {}

  void Run() {
    auto shapes = case_.made.shapes;
    shapes.push_back({"bytes", 37, 3, DType::kU8});  // gathered, never reduced
    group_ = comm_.RegisterGroup("g", shapes);
    params_.resize(case_.made.shapes.size());
    for (size_t p = 0; p < params_.size(); ++p) params_[p] = static_cast<int>(p);
    comm_.Reserve({{group_, params_, case_.made.grad_dtypes, DType::kF32}});
    for (int i = 0; i < 2; ++i) landings_.push_back(AddCanaryLanding());
    gradients_ = bed_.Copies(Gradients(layout(), case_.made.grad_dtypes, comm_.rank()));
    for (const int p : params_) {
      elems_ += layout().params()[static_cast<size_t>(p)].shard_elems;
    }
    output_ =
        bed_.Copy(std::vector<char>(static_cast<size_t>(elems_ * 4 + 2 * kCanaryBytes), kCanary));
    comm_.Barrier();  // canaries are written everywhere
    for (unsigned i = 0; i < 2; ++i) {
      Gather(i, Shards(layout(), case_.shard_dtype, comm_.rank(), kSeed + i));
      Reduce(/*accumulate=*/i > 0);
    }
    const bool refreshes = comm_.topology().nodes == 1;
    const auto changed = ChangedShards(layout(), case_.shard_dtype, comm_.rank(), kSeed + 1);
    if (refreshes) Gather(1, changed, /*refresh=*/true);
    Gather(0, Shards(layout(), case_.shard_dtype, comm_.rank(), kSeed));
    bed_.Synchronise();
    CheckLanding(0, Gathered(layout(), case_.shard_dtype, landings_[0], kSeed));
    const auto second = refreshes ? Refreshed : Gathered;
    CheckLanding(1, second(layout(), case_.shard_dtype, landings_[1], kSeed + 1));
    CheckOutput();
  }

 private:
  const GroupLayout& layout() const { return comm_.layout(group_); }

  SegmentView AddCanaryLanding() {
    const SegmentView segment =
        comm_.AddSegment(layout().landing_bytes() + 2 * CanaryBytes(), "landing");
    bed_.Upload(segment.address, std::vector<char>(static_cast<size_t>(segment.bytes), kCanary));
    return segment;
  }
  void Gather(unsigned i, const std::vector<std::vector<char>>& shards, bool refresh = false) {
    AllGatherCall call;
    call.group = group_;
    call.shards = bed_.Copies(shards);
    call.shard_dtypes = ShardDtypes(layout(), case_.shard_dtype);
    call.refresh = refresh;
    call.landing = {landings_[i].id, CanaryBytes()};
    call.stream = bed_.stream();
    comm_.AllGather(call);
  }
  void Reduce(bool accumulate) {
    ReduceScatterCall call;
    call.group = group_;
    call.params = params_;
    call.gradients = gradients_;
    call.grad_dtypes = case_.made.grad_dtypes;
    call.output = output_ + kCanaryBytes;
    call.scale = case_.made.scale;
    call.accumulate = accumulate;
    call.stream = bed_.stream();
    comm_.ReduceScatter(call);
  }

  std::string Where() const {
    return "rank " + std::to_string(comm_.rank()) + " of " +
           std::to_string(comm_.topology().nodes) + " x " +
           std::to_string(comm_.topology().local_ranks);
  }
  void CheckLanding(unsigned i, const std::vector<char>& expected) {
    const auto landed = bed_.Download(landings_[i].address, landings_[i].bytes);
    const auto wrong = std::mismatch(expected.begin(), expected.end(), landed.begin()).first;
    EXPECT_TRUE(wrong == expected.end())
        << "landing " << i << ", byte " << wrong - expected.begin() << ", " << Where();
  }
  void CheckOutput() {
    const auto once = case_.reference.Output(comm_.rank(), case_.made.scale, nullptr);
    const auto twice = case_.reference.Output(comm_.rank(), case_.made.scale, &once);
    std::vector<char> expected(static_cast<size_t>(elems_ * 4 + 2 * kCanaryBytes), kCanary);
    if (elems_ > 0) {
      std::memcpy(expected.data() + kCanaryBytes, twice.data(), static_cast<size_t>(elems_) * 4);
    }
    const auto output = bed_.Download(output_, static_cast<int64_t>(expected.size()));
    const auto wrong = std::mismatch(expected.begin(), expected.end(), output.begin()).first;
    EXPECT_TRUE(wrong == expected.end()) << "output, byte " << wrong - expected.begin() << " of "
                                         << expected.size() << ", " << Where();
  }

  Communicator& comm_;
  TestBed& bed_;
  const LayoutCase& case_;
  int group_ = -1;
  std::vector<int> params_;
  std::vector<SegmentView> landings_;
  std::vector<const void*> gradients_;
  int64_t elems_ = 0;
  char* output_ = nullptr;
};

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_TEST_BED_H_
