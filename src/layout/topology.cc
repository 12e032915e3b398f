#include <fmt/format.h>

#include "tide/error.h"
#include "tide/layout.h"

namespace tide {

Topology SplitIntoNodes(int world, int nodes) {
  if (nodes < 1 || world % nodes != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("nodes: expected a divisor of {} ranks, so that all nodes have as many "
                            "ranks, got {}",
                            world, nodes));
  }
  return {nodes, world / nodes};
}

}  // namespace tide
