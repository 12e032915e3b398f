// The example of docs/glossary.md: a reduce-scatter on 2 nodes of 2 ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tide/plan.h"

namespace tide {
namespace {

using Lines = std::vector<std::string>;

constexpr Topology kTopology{2, 2};
constexpr int64_t kShardBytes = 256;  // of a gradient

// "g[3]": the gradient of rank 3's shard; or the buffer.
std::string Place(const Program& program, const Ref& ref) {
  const Buffer& buffer = program.buffers[static_cast<size_t>(ref.buffer)];
  if (buffer.kind == BufferKind::kGradient) return fmt::format("g[{}]", ref.offset / kShardBytes);
  return fmt::format("{}+{}", Name(buffer.kind), ref.offset);
}

Lines Moves(const Program& program) {
  Lines lines;
  const auto place = [&](const Ref& ref) { return Place(program, ref); };
  for (const Operation& op : program.operations) {
    for (const Piece& piece : op.pieces) {
      lines.push_back(fmt::format("{} -> {} of {}", place(piece.src), place(piece.dst), op.peer));
    }
    for (const PutPiece& piece : op.puts) {
      lines.push_back(fmt::format("{} -> {} of {}, {} bytes", place(piece.src), place(piece.dst),
                                  op.peer, piece.bytes));
    }
    for (const SumPiece& piece : op.sums) {
      lines.push_back(fmt::format("{}{} + {} -> {}", op.scaled ? "scaled " : "",
                                  place(piece.sources[0]), place(piece.sources[1]),
                                  place(piece.dst)));
    }
  }
  return lines;
}

Program Plan(int rank, Placement placement) {
  const GroupLayout layout("g", {{"w", 8, 64, DType::kBF16}}, kTopology.Ranks());
  ReduceScatterOptions options;
  options.placement = placement;
  options.staging.slot_bytes = kShardBytes;
  const ReduceScatterSpec spec{{0}, {DType::kBF16}, DType::kF32};
  return PlanReduceScatter(layout, spec, kTopology, rank, options);
}

TEST(Glossary, DirectExample) {
  // By rank: whose shards it pushes and sums, for the other node and for its own.
  const int pushed[4][2] = {{3, 1}, {2, 0}, {1, 3}, {0, 2}};
  const int summed[4][2] = {{2, 0}, {3, 1}, {0, 2}, {1, 3}};
  for (int rank = 0; rank < 4; ++rank) {
    const int sibling = rank ^ 1;
    const int rail_peer = rank ^ 2;
    EXPECT_EQ(Moves(Plan(rank, Placement::kDirect)),
              (Lines{fmt::format("g[{}] -> staging+0 of {}", pushed[rank][0], sibling),
                     fmt::format("staging+0 + g[{}] -> outbox+0", summed[rank][0]),
                     fmt::format("g[{}] -> staging+0 of {}", pushed[rank][1], sibling),
                     fmt::format("staging+0 + g[{}] -> spare+0", summed[rank][1]),
                     fmt::format("outbox+0 -> inbox+0 of {}, 512 bytes", rail_peer),
                     "scaled inbox+0 + spare+0 -> output+0"}))
        << "rank " << rank;
  }
}

TEST(Glossary, LatinSquareExample) {
  for (int rank = 0; rank < 4; ++rank) {
    const Program program = Plan(rank, Placement::kLatinSquare);
    const int local = rank % 2;
    for (const Operation& op : program.operations) {
      if (op.kind == OpKind::kPut) {  // the block of sub-slice (local + 1) mod 2, two rows
        EXPECT_EQ(op.peer, rank ^ 2);
        ASSERT_EQ(op.puts.size(), 1U);
        EXPECT_EQ(op.puts[0].bytes, 512);
        EXPECT_EQ(op.puts[0].dst.offset, (local + 1) % 2 * 512);
      }
      if (op.kind == OpKind::kCopy && op.peer == rank) {  // the own node's, from the spare
        ASSERT_EQ(op.pieces.size(), 1U);
        EXPECT_EQ(op.pieces[0].dst.offset, local * 512);
      }
      if (op.kind != OpKind::kLand) continue;
      ASSERT_EQ(op.lands.size(), 2U);
      for (int slice = 0; slice < 2; ++slice) {
        // The other node's partial of the sub-slice lies at one local rank, the own node's at the
        // other.
        const LandPiece& piece = op.lands[static_cast<size_t>(slice)];
        EXPECT_EQ(piece.locals, (std::vector<int>{1 - slice, slice}));
        EXPECT_EQ(piece.block.offset, slice * 512 + local * 256);
        EXPECT_EQ(piece.dst.offset, slice * 256);
      }
    }
  }
}

}  // namespace
}  // namespace tide
