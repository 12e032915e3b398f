#include "plan/exhaustive.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "plan/memory_model.h"
#include "tide/error.h"
#include "tide/sizing.h"

namespace tide {
namespace internal {
namespace {

BlockMask AllBlocks(const Topology& topology) {
  const int bits = topology.local_ranks * topology.local_ranks;
  return bits == 64 ? ~BlockMask{0} : (BlockMask{1} << bits) - 1;
}

}  // namespace

BlockMask WrittenBlocks(const Topology& topology, const Wave& wave) {
  BlockMask mask = 0;
  for (int c = wave.first; c < wave.end(); ++c) {
    for (int j = 0; j < topology.local_ranks; ++j) {
      mask |= BlockMask{1} << (j * topology.local_ranks + SubSlice(topology, j, c));
    }
  }
  return mask;
}

InboxSchedule PlannedInbox(const Topology& topology, const std::vector<Wave>& waves, int passes,
                           int generations) {
  InboxSchedule schedule;
  schedule.generations = generations;
  const auto period = static_cast<size_t>(generations);
  std::vector<BlockMask> one_pass;
  one_pass.reserve(waves.size());
  for (const Wave& wave : waves) one_pass.push_back(WrittenBlocks(topology, wave));
  for (int pass = 0; pass < passes; ++pass) {
    schedule.writes.insert(schedule.writes.end(), one_pass.begin(), one_pass.end());
  }
  for (size_t x = 0; x < schedule.writes.size(); ++x) {
    const BlockMask before = x < period ? AllBlocks(topology) : schedule.writes[x - period];
    schedule.zeroes.push_back(before & ~schedule.writes[x]);
  }
  return schedule;
}

std::string FindStaleBlock(const Topology& topology, const InboxSchedule& schedule) {
  std::vector<BlockMask> filled(static_cast<size_t>(schedule.generations), AllBlocks(topology));
  for (size_t x = 0; x < schedule.writes.size(); ++x) {
    BlockMask& blocks = filled[x % filled.size()];
    if ((schedule.zeroes[x] & schedule.writes[x]) != 0) {
      return fmt::format("wave instance {} clears a block that it writes", x);
    }
    blocks &= ~schedule.zeroes[x];
    const BlockMask stale = blocks & ~schedule.writes[x];
    if (stale != 0) {
      const int bit = std::countr_zero(stale);
      return fmt::format("wave instance {} reads a stale partial in block {} of local rank {}", x,
                         bit % topology.local_ranks, bit / topology.local_ranks);
    }
    blocks |= schedule.writes[x];
  }
  return {};
}

std::string FindOutboxOverlap(const std::vector<Round>& rounds, int passes, int depth) {
  const auto total = static_cast<int>(rounds.size()) * passes;
  int before_last = 0;  // blocks sent by rounds up to i - 2
  int last = 0;         // blocks of round i - 1
  int first = 0;        // index of the first block of round i
  for (int i = 0; i < total; ++i) {
    const int count = rounds[static_cast<size_t>(i) % rounds.size()].count;
    // Block J replaces block J - depth, which must have been sent with round i - 2.
    if (first + count - depth > before_last) {
      return fmt::format("round {} needs {} outbox blocks beside the {} of the round before, of {}",
                         i, count, last, depth);
    }
    before_last += last;
    last = count;
    first += count;
  }
  return {};
}

}  // namespace internal

namespace {

using internal::Round;
using internal::Wave;

constexpr size_t kMaxFailures = 20;

void CheckOptions(const ExhaustiveOptions& options) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw Error(ErrorCode::kInvalidArgument, "exhaustive check: " + message);
  };
  const auto positive = [](int value) { return value >= 1; };
  require(options.max_nodes >= 2,
          fmt::format("expected at least 2 nodes, got {}", options.max_nodes));
  require(options.local_ranks >= 1 && options.local_ranks <= internal::kMaxMaskLocals,
          fmt::format("expected 1 to {} local ranks, got {}", internal::kMaxMaskLocals,
                      options.local_ranks));
  require(std::all_of(options.round_widths.begin(), options.round_widths.end(), positive),
          "expected round widths k of at least 1");
  require(std::all_of(options.passes.begin(), options.passes.end(), positive),
          "expected at least 1 pass");
}

// Checks all plans of one (M, width) pair and adds to the result.
class PairCheck {
 public:
  PairCheck(const ExhaustiveOptions& options, const Topology& topology, int width,
            ExhaustiveResult& result)
      : options_(options),
        topology_(topology),
        width_(width),
        waves_(internal::CutIntoWaves(topology, width)),
        result_(result) {}

  void Run() {
    ++result_.pairs;
    const std::vector<int> pair = internal::FindCollision(topology_, waves_);
    if (!pair.empty()) {
      result_.rejected.push_back({topology_.nodes, width_, pair[0], pair[1]});
      result_.rejected_plans += result_.variants;
      return;
    }
    for (size_t i = 0; i < options_.passes.size(); ++i) CheckPasses(i);
  }

 private:
  void CheckPasses(size_t index) {
    const int passes = options_.passes[index];
    // The inbox knows neither k nor the outbox: one simulation serves every variant.
    const int generations = internal::GenerationsOf(topology_, width_, passes);
    const std::string stale = internal::FindStaleBlock(
        topology_, internal::PlannedInbox(topology_, waves_, passes, generations));
    for (const int k : options_.round_widths) {
      options_.check_interrupt();
      const std::vector<Round> rounds = internal::CutIntoRounds(topology_, waves_, k);
      for (const Mode mode : options_.modes) {
        const int depth = internal::OutboxDepth(topology_, rounds, passes, mode);
        const std::string problem =
            stale.empty() ? internal::FindOutboxOverlap(rounds, passes, depth) : stale;
        if (problem.empty()) {
          ++result_.accepted_plans[index];
        } else {
          Fail(passes, k, mode, problem);
        }
      }
    }
  }

  void Fail(int passes, int k, Mode mode, const std::string& problem) {
    ++result_.failed_plans;
    if (result_.failures.size() == kMaxFailures) return;
    result_.failures.push_back(fmt::format("M={} L={} width={} k={} {} passes={}: {}",
                                           topology_.nodes, topology_.local_ranks, width_, k,
                                           Name(mode), passes, problem));
  }

  const ExhaustiveOptions& options_;
  const Topology topology_;
  const int width_;
  const std::vector<Wave> waves_;
  ExhaustiveResult& result_;
};

}  // namespace

ExhaustiveResult VerifyExhaustive(const ExhaustiveOptions& options) {
  CheckOptions(options);
  ExhaustiveResult result;
  result.variants = static_cast<int64_t>(options.round_widths.size() * options.modes.size());
  result.accepted_plans.assign(options.passes.size(), 0);
  for (int nodes = 2; nodes <= options.max_nodes; ++nodes) {
    for (int width = 1; width <= options.local_ranks; ++width) {
      PairCheck(options, {nodes, options.local_ranks}, width, result).Run();
    }
  }
  return result;
}

}  // namespace tide
