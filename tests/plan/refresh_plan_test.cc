// The all-gather into a landing that still holds the parameters.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tide/plan.h"

namespace tide {
namespace {

// Between an entry fence and a completion fence one operation, whatever the dtypes.
TEST(PlanRefresh, IsOneOperation) {
  const GroupLayout layout(
      "g", {{"p", 7, 2, DType::kBF16}, {"empty", 4, 0, DType::kBF16}, {"q", 5, 3, DType::kU8}}, 2);
  const Program program = PlanAllGather(layout, {DType::kF32, DType::kF32, DType::kU8}, {1, 2}, 1,
                                        {.first_cast_bytes = 64, .refresh = true});
  EXPECT_EQ(ToText(program), R"(refreshing all_gather of rank 1 (1 x 2)
  main     await     ready
  main     signal    entry of rank 1 on rank 0
  main     wait      entry of rank 0 >= +1
  main     refresh   2 pieces, 17 elements
  main     record    read_done
  main     signal    landed of rank 1 on rank 0
  main     wait      landed of rank 0 >= +1
  main     record    done
)");
  const std::vector<CastPiece>& pieces = program.operations.at(3).casts;
  ASSERT_EQ(pieces.size(), 2U);
  for (const int param : {0, 2}) {
    const CastPiece& piece = pieces[param == 0 ? 0 : 1];
    const auto name = [&](Ref ref) {
      return ToString(program.buffers[static_cast<size_t>(ref.buffer)]);
    };
    EXPECT_EQ(name(piece.dst), "landing");
    EXPECT_EQ(piece.dst.offset, layout.LandingOffset(param, 1));
    EXPECT_EQ(name(piece.src), "shard[" + std::to_string(param) + "]");
    EXPECT_EQ(piece.elems, layout.params()[static_cast<size_t>(param)].shard_elems);
    EXPECT_EQ(piece.dst_dtype, param == 0 ? DType::kBF16 : DType::kU8);
    EXPECT_EQ(piece.src_dtype, param == 0 ? DType::kF32 : DType::kU8);
  }
  EXPECT_NE(ToJson(program).find("\"op\": \"refresh\""), std::string::npos);
}

}  // namespace
}  // namespace tide
