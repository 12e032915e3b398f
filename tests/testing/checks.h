// Checks of one collective call against a scalar reference; run by every rank.
#ifndef TIDE_TESTS_TESTING_CHECKS_H_
#define TIDE_TESTS_TESTING_CHECKS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "testing/cases.h"
#include "tide/communicator.h"
#include "tide/plan.h"

namespace tide::testing {

inline constexpr unsigned kSeed = 7;
inline constexpr int64_t kCanaryBytes = 256;
inline constexpr char kCanary = 0x5a;

// One rank's padded shard of every parameter; the same seed gives the same bytes on all ranks.
inline std::vector<std::vector<char>> Shards(const GroupLayout& layout, DType dtype, int rank) {
  std::vector<std::vector<char>> shards;
  std::mt19937 random(kSeed + static_cast<unsigned>(rank));
  for (const ParamLayout& param : layout.params()) {
    shards.push_back(RandomValues(random, dtype, param.shard_elems));
  }
  return shards;
}

template <typename Buffers>
std::vector<const void*> Pointers(const Buffers& buffers) {
  std::vector<const void*> pointers;
  // A vector without elements may have no address; the call wants one for buffers of 0 bytes, too.
  for (const auto& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

inline void CheckAllGather(Communicator& comm, const ShapeCase& shape, DType dtype) {
  const int group = comm.RegisterGroup(shape.name, MakeShapes(shape, dtype));
  const GroupLayout& layout = comm.layout(group);
  const int64_t bytes = layout.landing_bytes() + 2 * kCanaryBytes;
  const SegmentView segment = comm.AddSegment(bytes, "landing");
  std::memset(segment.address, kCanary, static_cast<size_t>(bytes));
  comm.Barrier();
  const auto shards = Shards(layout, dtype, comm.rank());
  comm.AllGather({group,
                  Pointers(shards),
                  std::vector<DType>(shards.size(), dtype),
                  {segment.id, kCanaryBytes}});

  std::vector<char> expected(static_cast<size_t>(bytes), kCanary);
  for (int rank = 0; rank < comm.topology().Ranks(); ++rank) {
    const auto theirs = Shards(layout, dtype, rank);
    for (size_t p = 0; p < theirs.size(); ++p) {
      const int64_t at = kCanaryBytes + layout.LandingOffset(static_cast<int>(p), rank);
      std::copy(theirs[p].begin(), theirs[p].end(), expected.begin() + at);
    }
  }
  EXPECT_EQ(std::memcmp(segment.address, expected.data(), expected.size()), 0)
      << shape.name << " " << Name(dtype) << " rank " << comm.rank() << " of "
      << comm.topology().Ranks();
  comm.Barrier();
}

// Gradients of one rank: D_p * K_p elements each.
inline std::vector<std::vector<char>> Gradients(const GroupLayout& layout,
                                                const std::vector<DType>& dtypes, int rank) {
  std::vector<std::vector<char>> gradients;
  std::mt19937 random(100 + kSeed + static_cast<unsigned>(rank));
  for (size_t p = 0; p < dtypes.size(); ++p) {
    const ParamShape& shape = layout.params()[p].shape;
    gradients.push_back(RandomValues(random, dtypes[p], shape.rows * shape.row_elems));
  }
  return gradients;
}

// The documented order (docs/design.md), computed element by element.
//
// Node partial: local ranks in order, the owner last. Then waves: contributors in the order
// c = 1..M, own node last; the wave's sum is scaled once and added to the output.
class ReductionReference {
 public:
  ReductionReference(const GroupLayout& layout, const Topology& topology,
                     const ReduceScatterOptions& options, const std::vector<DType>& dtypes)
      : layout_(layout), topology_(topology), options_(options), dtypes_(dtypes) {
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      all_.push_back(Gradients(layout, dtypes, rank));
    }
    for (size_t p = 0; p < dtypes.size(); ++p) {
      positions_.push_back(line_);
      line_ += AlignUp(layout.params()[p].shard_elems, 32);
    }
  }

  std::vector<float> Output(int rank, float scale, const std::vector<float>* old) const {
    std::vector<float> out;
    for (size_t p = 0; p < dtypes_.size(); ++p) {
      const ParamLayout& param = layout_.params()[p];
      const int64_t live = layout_.LiveElems(static_cast<int>(p), rank);
      for (int64_t i = 0; i < param.shard_elems; ++i) {
        const float* before = old != nullptr ? &(*old)[out.size()] : nullptr;
        out.push_back(i < live ? Element(rank, p, i, scale, before) : 0);
      }
    }
    return out;
  }

 private:
  float Element(int rank, size_t p, int64_t i, float scale, const float* old) const {
    const int nodes = topology_.nodes;
    const int width = options_.wave_width > 0      ? options_.wave_width
                      : topology_.local_ranks == 1 ? 8
                                                   : topology_.local_ranks;
    float out = old != nullptr ? *old : 0;
    bool stored = old != nullptr;
    for (int first = 1; first <= nodes; first += width) {
      float sum = 0;
      for (int c = first; c < std::min(first + width, nodes + 1); ++c) {
        const float partial = Partial(rank, c, p, i);
        sum = c == first ? partial : sum + partial;
      }
      sum *= scale;
      out = stored ? out + sum : sum;
      stored = true;
    }
    return out;
  }

  float Partial(int rank, int contributor, size_t p, int64_t i) const {
    const int locals = topology_.local_ranks;
    const int node = (topology_.Node(rank) - contributor + topology_.nodes) % topology_.nodes;
    const int owner = Owner(rank, contributor, positions_[p] + i);
    const int64_t at = rank * layout_.params()[p].shard_elems + i;
    float sum = 0;
    bool first = true;
    for (int turn = 0; turn <= locals; ++turn) {
      if (turn == owner) continue;
      const int source = topology_.Rank(node, turn == locals ? owner : turn);
      const float value = ValueAt(all_[static_cast<size_t>(source)][p], dtypes_[p], at);
      sum = first ? value : sum + value;
      first = false;
    }
    return sum;
  }

  // The local rank of the contributing node that sums the element (paper, equation 7).
  int Owner(int rank, int contributor, int64_t position) const {
    const int locals = topology_.local_ranks;
    if (options_.placement == Placement::kDirect || topology_.nodes == 1) {
      return topology_.Local(rank);
    }
    const int64_t slice = AlignUp((line_ + locals - 1) / locals, 32);
    const auto s = static_cast<int>(position / slice);
    return ((s - contributor % topology_.nodes) % locals + locals) % locals;
  }

  const GroupLayout& layout_;
  const Topology topology_;
  const ReduceScatterOptions options_;
  const std::vector<DType> dtypes_;
  std::vector<std::vector<std::vector<char>>> all_;
  std::vector<int64_t> positions_;
  int64_t line_ = 0;
};

struct ReduceCase {
  std::vector<DType> dtypes;
  float scale = 1.0F;
  bool accumulate = false;
};

inline void CheckReduceScatter(Communicator& comm, const ShapeCase& shape, const ReduceCase& reduce,
                               const ReduceScatterOptions& options = {}) {
  const int group = comm.RegisterGroup(shape.name, MakeShapes(shape, DType::kBF16));
  const GroupLayout& layout = comm.layout(group);
  const auto gradients = Gradients(layout, reduce.dtypes, comm.rank());
  std::vector<int> params(gradients.size());
  int64_t elems = 0;
  for (size_t p = 0; p < params.size(); ++p) {
    params[p] = static_cast<int>(p);
    elems += layout.params()[p].shard_elems;
  }
  const auto canary = static_cast<size_t>(kCanaryBytes) / sizeof(float);
  std::vector<float> output(static_cast<size_t>(elems) + 2 * canary, -7.5F);
  std::vector<float> old(static_cast<size_t>(elems), 0.25F);
  if (reduce.accumulate)
    std::copy(old.begin(), old.end(), output.begin() + static_cast<int64_t>(canary));
  const auto expected = ReductionReference(layout, comm.topology(), options, reduce.dtypes)
                            .Output(comm.rank(), reduce.scale, reduce.accumulate ? &old : nullptr);
  comm.ReduceScatter({group, params, Pointers(gradients), reduce.dtypes, output.data() + canary,
                      DType::kF32, reduce.scale, reduce.accumulate});
  size_t at = canary;
  for (size_t p = 0; p < params.size(); ++p) {
    const int64_t live = layout.LiveElems(static_cast<int>(p), comm.rank());
    for (int64_t i = 0; i < layout.params()[p].shard_elems; ++i, ++at) {
      if (reduce.accumulate && i >= live) continue;  // padding keeps what it had
      ASSERT_EQ(output[at], expected[at - canary])
          << shape.name << " parameter " << p << " element " << i;
    }
  }
  for (size_t i = 0; i < canary; ++i) {
    ASSERT_EQ(output[i], -7.5F);
    ASSERT_EQ(output[output.size() - 1 - i], -7.5F);
  }
}

inline std::vector<DType> Alternate(size_t count) {
  std::vector<DType> dtypes;
  for (size_t p = 0; p < count; ++p) dtypes.push_back(p % 2 == 0 ? DType::kBF16 : DType::kF32);
  return dtypes;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_CHECKS_H_
