// Checks of one collective call against a scalar reference; run by every rank.
#ifndef TIDE_TESTS_TESTING_CHECKS_H_
#define TIDE_TESTS_TESTING_CHECKS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "testing/cases.h"
#include "testing/landings.h"
#include "tide/communicator.h"
#include "tide/plan.h"

namespace tide::testing {

inline constexpr unsigned kSeed = 7;
inline constexpr int64_t kCanaryBytes = 256;

inline void CheckAllGather(Communicator& comm, const std::string& name,
                           const std::vector<ParamShape>& shapes, DType shard_dtype,
                           SegmentKind kind = SegmentKind::kPerRank) {
  const int group = comm.RegisterGroup(name, shapes);
  const SegmentView segment = AddLanding(comm, group, kind);
  Gather(comm, group, segment, kSeed, shard_dtype);
  const auto expected = Gathered(comm.layout(group), shard_dtype, segment, kSeed);
  EXPECT_EQ(std::memcmp(segment.address, expected.data(), expected.size()), 0)
      << name << " " << Name(shard_dtype) << " rank " << comm.rank() << " of "
      << comm.topology().nodes << " x " << comm.topology().local_ranks << ", kind "
      << static_cast<int>(kind);
  comm.Barrier();
}

inline void CheckAllGather(Communicator& comm, const ShapeCase& shape, DType dtype,
                           SegmentKind kind = SegmentKind::kPerRank) {
  CheckAllGather(comm, shape.name, MakeShapes(shape, dtype), dtype, kind);
}

// One node: what has changed since an all-gather comes by a refresh; nothing changes before
// another.
inline void CheckRefresh(Communicator& comm, const std::string& name,
                         const std::vector<ParamShape>& shapes, DType shard_dtype,
                         SegmentKind kind) {
  const int group = comm.RegisterGroup(name, shapes);
  const SegmentView segment = AddLanding(comm, group, kind);
  Gather(comm, group, segment, kSeed, shard_dtype);
  const auto expected = Refreshed(comm.layout(group), shard_dtype, segment, kSeed);
  for (const char* which : {"first", "second"}) {
    Refresh(comm, group, segment, kSeed, shard_dtype);
    EXPECT_EQ(std::memcmp(segment.address, expected.data(), expected.size()), 0)
        << which << " refresh of " << name << ", " << Name(shard_dtype) << ", rank " << comm.rank()
        << " of " << comm.topology().local_ranks << ", kind " << static_cast<int>(kind);
    comm.Barrier();
  }
}

// Gradients of one rank: D_p * K_p elements each.
inline std::vector<std::vector<char>> Gradients(const GroupLayout& layout,
                                                const std::vector<DType>& dtypes, int rank,
                                                unsigned seed = kSeed) {
  std::vector<std::vector<char>> gradients;
  std::mt19937 random(100 + seed + static_cast<unsigned>(rank));
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
                     const ReduceScatterOptions& options, const std::vector<DType>& dtypes,
                     unsigned seed = kSeed)
      : layout_(layout), topology_(topology), options_(options), dtypes_(dtypes) {
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      all_.push_back(Gradients(layout, dtypes, rank, seed));
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

// Writes one element of `bytes`; fp32 or bf16.
inline void Store(std::vector<char>* bytes, DType dtype, int64_t index, float value) {
  char* at = bytes->data() + index * static_cast<int64_t>(ItemSize(dtype));
  const uint16_t half = FloatToBF16(value);
  if (dtype == DType::kF32) {
    std::memcpy(at, &value, sizeof value);
  } else {
    std::memcpy(at, &half, sizeof half);
  }
}

struct ReduceCase {
  std::vector<DType> dtypes;
  float scale = 1.0F;
  bool accumulate = false;
  DType output = DType::kF32;
};

inline constexpr float kOldOutput = 0.25F;

inline void CheckReduceScatter(Communicator& comm, const std::string& name,
                               const std::vector<ParamShape>& shapes, const ReduceCase& reduce,
                               const ReductionReference& reference) {
  const int group = comm.RegisterGroup(name, shapes);
  const GroupLayout& layout = comm.layout(group);
  const auto gradients = Gradients(layout, reduce.dtypes, comm.rank());
  std::vector<int> params(gradients.size());
  int64_t elems = 0;
  for (size_t p = 0; p < params.size(); ++p) {
    params[p] = static_cast<int>(p);
    elems += layout.params()[p].shard_elems;
  }
  const auto item = static_cast<int64_t>(ItemSize(reduce.output));
  std::vector<char> output(static_cast<size_t>(elems * item + 2 * kCanaryBytes), kCanary);
  const std::vector<float> old(static_cast<size_t>(elems), kOldOutput);
  for (int64_t i = 0; reduce.accumulate && i < elems; ++i) {
    Store(&output, reduce.output, kCanaryBytes / item + i, kOldOutput);
  }
  const auto expected =
      reference.Output(comm.rank(), reduce.scale, reduce.accumulate ? &old : nullptr);
  comm.ReduceScatter({group, params, Pointers(gradients), reduce.dtypes,
                      output.data() + kCanaryBytes, reduce.output, reduce.scale,
                      reduce.accumulate});
  int64_t at = 0;
  for (size_t p = 0; p < params.size(); ++p) {
    const int64_t live = layout.LiveElems(static_cast<int>(p), comm.rank());
    for (int64_t i = 0; i < layout.params()[p].shard_elems; ++i, ++at) {
      if (reduce.accumulate && i >= live) continue;  // padding keeps what it had
      const float wanted = expected[static_cast<size_t>(at)];
      ASSERT_EQ(ValueAt(output, reduce.output, kCanaryBytes / item + at),
                reduce.output == DType::kBF16 ? BF16ToFloat(FloatToBF16(wanted)) : wanted)
          << name << " parameter " << p << " element " << i << " rank " << comm.rank() << " of "
          << comm.topology().nodes << " x " << comm.topology().local_ranks;
    }
  }
  for (int64_t i = 0; i < kCanaryBytes; ++i) {
    ASSERT_EQ(output[static_cast<size_t>(i)], kCanary);
    ASSERT_EQ(output[output.size() - 1 - static_cast<size_t>(i)], kCanary);
  }
}

inline void CheckReduceScatter(Communicator& comm, const ShapeCase& shape,
                               const ReduceCase& reduce) {
  const auto shapes = MakeShapes(shape, DType::kBF16);
  const GroupLayout layout(shape.name, shapes, comm.topology().Ranks());
  CheckReduceScatter(comm, shape.name, shapes, reduce,
                     ReductionReference(layout, comm.topology(), {}, reduce.dtypes));
}

inline std::vector<DType> Alternate(size_t count) {
  std::vector<DType> dtypes;
  for (size_t p = 0; p < count; ++p) dtypes.push_back(p % 2 == 0 ? DType::kBF16 : DType::kF32);
  return dtypes;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_CHECKS_H_
