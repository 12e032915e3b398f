// What a request may ask for: the rules, and the choices that memory does not change.
#include <fmt/format.h>

#include <algorithm>

#include "plan/memory_model.h"
#include "plan/sizing.h"
#include "tide/error.h"

namespace tide {
namespace internal {
namespace {

[[noreturn]] void Refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

bool Square(const Topology& topology, Placement placement) {
  return topology.nodes > 1 && topology.local_ranks > 1 && placement == Placement::kLatinSquare;
}

// Why waves of `width` are impossible, and what would be allowed; empty if they are possible.
std::string WidthObstacle(const Topology& topology, Placement placement, int width) {
  if (!Square(topology, placement)) {
    const int most = std::max(WidestWave(topology), topology.nodes);
    if (width >= 1 && width <= most) return {};
    return fmt::format("a wave holds 1 to max(L, M) contributors; allowed: 1 to {}", most);
  }
  const std::vector<int> allowed = AllowedWaveWidths(topology);
  if (std::find(allowed.begin(), allowed.end(), width) != allowed.end()) return {};
  std::string rule = fmt::format(
      "latin_square gives each contributor of a wave its own of {} local "
      "ranks",
      topology.local_ranks);
  if (width >= 1 && width <= topology.local_ranks) {
    const auto pair = FindCollision(topology, CutIntoWaves(topology, width));
    rule = fmt::format(
        "contributors {} and {} of one wave would meet on one local rank "
        "(latin_square, M = {}, L = {})",
        pair[0], pair[1], topology.nodes, topology.local_ranks);
  }
  return fmt::format("{}; allowed: {}", rule, fmt::join(allowed, ", "));
}

// A call has M - 1 transfers, so a wider round is none. Planners take any k, since a variable of
// the environment is of jobs of every size; but who asks for the plan of one k must get that.
void CheckRoundWidth(const Topology& topology, int k) {
  const int most = std::max(1, topology.nodes - 1);
  if (k >= 1 && k <= most) return;
  Refuse(fmt::format("round width k: expected at {}, got {}; allowed: 1 to {}",
                     k < 1 ? "least 1" : fmt::format("most max(1, M-1) = {}", most), k, most));
}

}  // namespace

void CheckRequest(const SizingRequest& request) {
  const Topology& topology = request.topology;
  if (topology.nodes < 1 || topology.local_ranks < 1 || topology.Ranks() < 2) {
    Refuse(fmt::format("topology: expected at least 2 ranks, got {} nodes of {} local ranks",
                       topology.nodes, topology.local_ranks));
  }
  if (request.groups.empty()) Refuse("groups: expected at least one");
  for (const SizedGroup& group : request.groups) {
    if (group.layout.ranks() == topology.Ranks()) continue;
    Refuse(fmt::format("group '{}': expected a layout over {} x {} = {} ranks, got {}",
                       group.layout.name(), topology.nodes, topology.local_ranks, topology.Ranks(),
                       group.layout.ranks()));
  }
  if (request.passes.value_or(1) < 1) {
    Refuse(fmt::format("passes: expected at least 1, got {}", *request.passes));
  }
  if (request.passes.value_or(1) > kMostPasses) {
    Refuse(fmt::format("passes: expected at most {}, got {}", kMostPasses, *request.passes));
  }
  CheckRoundWidth(topology, request.round_width.value_or(1));
  if (request.chunk_bytes.value_or(kStagingAlignment) < kStagingAlignment) {
    Refuse(fmt::format("chunk: expected at least {} bytes, got {}", kStagingAlignment,
                       *request.chunk_bytes));
  }
}

Chosen<Placement> ChoosePlacement(const SizingRequest& request) {
  const MachineModel& machine = request.machine;
  if (request.topology.nodes == 1) {
    return {Placement::kDirect, "one node: there is no second level"};
  }
  if (request.topology.local_ranks == 1) {
    return {Placement::kDirect, "one rank a node: it sums what arrives, no switch takes part"};
  }
  const bool wanted = request.placement == Placement::kLatinSquare;
  if (wanted && !machine.multicast_reduction) {
    Refuse(
        fmt::format("placement latin_square: needs reduction through the switch, which machine "
                    "'{}' does not offer or has switched off; allowed: direct",
                    machine.name));
  }
  if (request.placement) return {*request.placement, "asked for"};
  if (machine.multicast_reduction) {
    return {Placement::kLatinSquare,
            fmt::format("machine '{}' reduces through the switch: one read adds up to {} nodes",
                        machine.name, request.topology.local_ranks)};
  }
  return {Placement::kDirect,
          fmt::format("machine '{}' has no reduction through the switch, or has it switched off; "
                      "direct moves the same rail bytes, clears nothing and waits for no sibling",
                      machine.name)};
}

Chosen<int> ChooseWaveWidth(const SizingRequest& request, Placement placement) {
  const Topology& topology = request.topology;
  const int width = request.wave_width.value_or(WidestWave(topology));
  const std::string obstacle = WidthObstacle(topology, placement, width);
  if (!obstacle.empty()) Refuse(fmt::format("wave width {}: {}", width, obstacle));
  return {width, fmt::format("{}; {} contributors in waves of at most {}: {}",
                             request.wave_width ? "asked for" : "as many as one landing adds",
                             topology.nodes, width, CutIntoWaves(topology, width).size())};
}

std::string SlotReuseObstacle(const std::vector<SizedGroup>& groups) {
  for (const SizedGroup& group : groups) {
    for (size_t i = 0; i < group.spec.params.size(); ++i) {
      const ParamShape& shape =
          group.layout.params()[static_cast<size_t>(group.spec.params[i])].shape;
      if (group.spec.grad_dtypes[i] == shape.dtype) continue;
      return fmt::format(
          "mode slot_reuse: needs gradients in the all-gather dtype; parameter '{}' "
          "of group '{}' is gathered in {} and has gradients in {}; allowed: "
          "in_place",
          shape.name, group.layout.name(), Name(shape.dtype), Name(group.spec.grad_dtypes[i]));
    }
  }
  return {};
}

}  // namespace internal

}  // namespace tide
