// Shapes, shards and offsets of an FSDP2 parameter group (paper, section 2.1).
//
//   Topology topology{.nodes = 1, .local_ranks = 4};
//   GroupLayout layout("layers.0", {{"weight", 5, 3, DType::kBF16}}, topology.Ranks());
//   layout.params()[0].shard_rows;        // ceil(5 / 4) = 2
//   layout.LiveRows(0, 3);                // 0: rank 3's shard is padding only
#ifndef TIDE_LAYOUT_H_
#define TIDE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tide/dtype.h"

namespace tide {

// M nodes of L local ranks each; ranks are node-major: r = n*L + l.
struct Topology {
  int nodes = 1;
  int local_ranks = 1;

  int Ranks() const { return nodes * local_ranks; }
  int Node(int rank) const { return rank / local_ranks; }
  int Local(int rank) const { return rank % local_ranks; }
  int Rank(int node, int local) const { return node * local_ranks + local; }
};

// `world` ranks on `nodes` nodes, node by node. Throws Error(kInvalidArgument) unless all nodes get
// as many ranks.
Topology SplitIntoNodes(int world, int nodes);

// One parameter as the caller sees it: D rows of K elements, all-gathered in `dtype`.
struct ParamShape {
  std::string name;
  int64_t rows = 0;
  int64_t row_elems = 0;
  DType dtype = DType::kF32;
};

// One parameter as ranks hold it. Padding rows are counted, as in FSDP2.
struct ParamLayout {
  ParamShape shape;
  int64_t shard_rows = 0;      // R_p = ceil(D_p / N)
  int64_t shard_elems = 0;     // R_p * K_p
  int64_t shard_bytes = 0;     // s_p, in the all-gather dtype
  int64_t landing_offset = 0;  // base_p: bytes from the start of the landing, a multiple of 256
};

// Landings start on this boundary because GEMM kernels want aligned pointers (the paper packs o_p *
// N).
inline constexpr int64_t kLandingAlignment = 256;

// Smallest multiple of `alignment` that is >= value.
constexpr int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// The layout of a group over N ranks. Immutable; equal on all ranks.
class GroupLayout {
 public:
  // Throws Error(kInvalidArgument) for negative extents or ranks < 1.
  GroupLayout(std::string name, const std::vector<ParamShape>& shapes, int ranks);

  const std::string& name() const { return name_; }
  int ranks() const { return ranks_; }
  const std::vector<ParamLayout>& params() const { return params_; }
  // Bytes of one landing slot of this group, a multiple of kLandingAlignment.
  int64_t landing_bytes() const { return landing_bytes_; }
  // Byte offset of rank r's shard of parameter p inside the landing (paper, equation 2).
  int64_t LandingOffset(int param, int rank) const;
  // Rows of parameter p that rank r really owns: [r*R_p, min((r+1)*R_p, D_p)).
  int64_t LiveRows(int param, int rank) const;
  // The same in elements.
  int64_t LiveElems(int param, int rank) const;

 private:
  std::string name_;
  int ranks_;
  std::vector<ParamLayout> params_;
  int64_t landing_bytes_ = 0;
};

}  // namespace tide

#endif  // TIDE_LAYOUT_H_
