#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "plan/memory_model.h"
#include "plan/sizing.h"
#include "tide/error.h"

namespace tide {
namespace internal {
namespace {

constexpr double kGiga = 1e9;
// Waits for peers may take this much of the wire time before a wider round pays.
constexpr double kWaitShare = 0.10;

int SourcesOfSum(const Topology& topology) {
  if (topology.local_ranks > 1) return topology.local_ranks;
  return std::min(kExpertWaveWidth, std::max(1, topology.nodes - 1));
}

// Bytes that sums read and write for every byte that the rail moves (equation 13).
double WorkOfRailByte(const Topology& topology, int64_t grad_item) {
  const double item = static_cast<double>(grad_item) / 4;
  if (topology.local_ranks > 1) return topology.local_ranks * item + 1;
  const double arriving = SourcesOfSum(topology) * item;
  return (arriving + 2) / arriving;
}

// The same for every byte that arrives from the siblings of the only node: the owner's own gradient
// is read, too, and the sum is written in fp32.
double WorkOfLinkByte(const Topology& topology, int64_t grad_item) {
  if (topology.local_ranks == 1) return 0;
  const auto item = static_cast<double>(grad_item);
  return (topology.local_ranks * item + 4) / ((topology.local_ranks - 1) * item);
}

// Of the fastest rate: what measuring twice may differ by.
constexpr double kAlmost = 0.95;

// A count that was measured: rate, and time added beside compute.
struct Candidate {
  AddedTime added;
  double gb_per_s = 0;
};

std::vector<Candidate> MeasuredCandidates(const MachineModel& machine, const Topology& topology) {
  if (machine.sum_added.empty() || machine.sum_curves.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("machine '{}': expected sum_curves and sum_added to choose the CTAs of "
                            "a sum from; tide calibrate measures them",
                            machine.name));
  }
  std::vector<Candidate> candidates;
  for (const AddedTime& added : machine.sum_added) {
    candidates.push_back({added, machine.SumGbPerS(SourcesOfSum(topology), added.ctas)});
  }
  return candidates;
}

// The first of `keeping` whose added time can't be told from the least.
const Candidate& LeastDisturbing(const std::vector<Candidate>& keeping, const Candidate& least) {
  return *std::find_if(keeping.begin(), keeping.end(), [&](const Candidate& candidate) {
    const double noise = std::hypot(candidate.added.noise_ms, least.added.noise_ms);
    return candidate.added.ms - least.added.ms <= noise;
  });
}

}  // namespace

GroupBytes BytesOf(const SizedGroup& group, bool resident) {
  GroupBytes bytes;
  const auto& params = group.layout.params();
  bytes.cast = !resident;
  for (size_t p = 0; p < params.size(); ++p) {
    bytes.shard += params[p].shard_bytes;
    bytes.cast |= group.shard_dtypes[p] != params[p].shape.dtype;
  }
  for (size_t i = 0; i < group.spec.params.size(); ++i) {
    const int64_t elems = params[static_cast<size_t>(group.spec.params[i])].shard_elems;
    const auto item = static_cast<int64_t>(ItemSize(group.spec.grad_dtypes[i]));
    bytes.fp32 += 4 * elems;
    bytes.grad += item * elems;
    bytes.mixed_grads |= bytes.grad_item != 0 && item != bytes.grad_item;
    bytes.grad_item = std::max(bytes.grad_item, item);
  }
  bytes.narrow_output = group.spec.output_dtype != DType::kF32;
  return bytes;
}

double WireSeconds(const MachineModel& machine, const Topology& topology, const GroupBytes& bytes) {
  const int64_t block = topology.local_ranks == 1 && !bytes.mixed_grads ? bytes.grad : bytes.fp32;
  return static_cast<double>((topology.nodes - 1) * block) / (machine.nic_gb_per_s * kGiga);
}

int SumCtas(const MachineModel& machine, const Topology& topology, int64_t grad_item) {
  const double work = WorkOfRailByte(topology, grad_item);
  return static_cast<int>(
      std::ceil(machine.skew_factor * work * machine.nic_gb_per_s / machine.sum_gb_per_s));
}

double NeededSumGbPerS(const MachineModel& machine, const Topology& topology, int64_t grad_item) {
  if (topology.nodes > 1) {
    return machine.skew_factor * WorkOfRailByte(topology, grad_item) * machine.nic_gb_per_s;
  }
  return machine.skew_factor * WorkOfLinkByte(topology, grad_item) * machine.nvlink_gb_per_s;
}

Chosen<int> ChooseSumCtas(const MachineModel& machine, const Topology& topology,
                          int64_t grad_item) {
  const std::vector<Candidate> candidates = MeasuredCandidates(machine, topology);
  const double needed = NeededSumGbPerS(machine, topology, grad_item);
  const int at_least = topology.nodes > 1 ? SumCtas(machine, topology, grad_item) : 1;
  std::vector<Candidate> keeping;
  for (const Candidate& candidate : candidates) {
    if (candidate.gb_per_s >= needed && candidate.added.ctas >= at_least) {
      keeping.push_back(candidate);
    }
  }
  const std::string wanted =
      topology.nodes > 1
          ? fmt::format("{:.0f} GB/s of sums for {:g} GB/s of rail, equation 13: {} CTAs", needed,
                        machine.nic_gb_per_s, at_least)
          : fmt::format("{:.0f} GB/s of sums for {:g} GB/s of links", needed,
                        machine.nvlink_gb_per_s);
  if (keeping.empty()) {
    const Candidate& fastest = *std::max_element(
        candidates.begin(), candidates.end(),
        [](const Candidate& a, const Candidate& b) { return a.gb_per_s < b.gb_per_s; });
    // More CTAs for the same rate would only take multiprocessors from compute.
    const Candidate& chosen =
        *std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
          return candidate.gb_per_s >= kAlmost * fastest.gb_per_s;
        });
    return {chosen.added.ctas,
            fmt::format("none keeps up ({}): the fewest that are almost the fastest, {:.0f} GB/s",
                        wanted, chosen.gb_per_s)};
  }
  const Candidate& least = *std::min_element(
      keeping.begin(), keeping.end(),
      [](const Candidate& a, const Candidate& b) { return a.added.ms < b.added.ms; });
  const Candidate& chosen = LeastDisturbing(keeping, least);
  std::string why = fmt::format("keeps up ({}) with {:.0f} GB/s and adds {:.3f} ms", wanted,
                                chosen.gb_per_s, chosen.added.ms);
  if (keeping.front().added.ctas != chosen.added.ctas) {
    why += fmt::format("; {} CTAs keep up, too, and add {:.3f} ms", keeping.front().added.ctas,
                       keeping.front().added.ms);
  } else if (least.added.ctas != chosen.added.ctas) {
    why += fmt::format("; {} CTAs add {:.3f} ms, no less beyond noise", least.added.ctas,
                       least.added.ms);
  }
  return {chosen.added.ctas, why};
}

int LandingCtas(const MachineModel& machine, double wire_seconds, int64_t fp32_bytes, int passes) {
  const double last_landing = static_cast<double>(fp32_bytes) / passes;
  const double tail = machine.tail_fraction * wire_seconds * machine.land_gb_per_s * kGiga;
  const double wanted = tail > 0 ? std::ceil(last_landing / tail) : 1;
  const double ceiling = std::floor(machine.land_cap_gb_per_s / machine.land_gb_per_s);
  return static_cast<int>(std::max(1.0, std::min(ceiling, wanted)));
}

RoundWidth ChooseRoundWidth(const MachineModel& machine, const Topology& topology, int wave_width,
                            int passes, double wire_seconds) {
  const auto rounds_of = [&](int k) {
    return static_cast<int>(RoundsOf(topology, wave_width, k).size());
  };
  const double wire_ms = 1e3 * wire_seconds;
  RoundWidth width;
  width.k = std::max(1, std::min(2, topology.nodes - 1));
  width.rounds = rounds_of(width.k);
  width.why = fmt::format("starts at min(2, M-1) = {}", width.k);
  while (true) {
    const double wait_ms = passes * width.rounds * machine.round_wait_ms;
    const std::string waits = fmt::format("{} rounds x {:g} ms = {:.1f} ms of waits",
                                          passes * width.rounds, machine.round_wait_ms, wait_ms);
    if (wait_ms <= kWaitShare * wire_ms) {
      width.why += fmt::format("; {}, within 10 % of {:.1f} ms on the wire", waits, wire_ms);
      return width;
    }
    if (2 * width.k > machine.max_round_width) {
      width.why += fmt::format("; k_max = {}", machine.max_round_width);
      return width;
    }
    const int wider = rounds_of(2 * width.k);
    if (wider >= width.rounds) {
      width.why += fmt::format("; a wider round saves none of the {} rounds", width.rounds);
      return width;
    }
    width.why += fmt::format("; {} > 10 % of {:.1f} ms on the wire, k = {} saves {}", waits,
                             wire_ms, 2 * width.k, passes * (width.rounds - wider));
    width.k *= 2;
    width.rounds = wider;
  }
}

std::string HumanBytes(int64_t bytes) {
  constexpr std::array<const char*, 4> kUnits = {"B", "KiB", "MiB", "GiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.4g} {}", value, kUnits[unit]);
}

}  // namespace internal

LaneConnections ConnectionsOf(const Topology& topology, int contexts) {
  LaneConnections lane;
  if (topology.nodes == 1) return lane;  // no rail, no RMA context
  const int64_t nodes = topology.nodes;
  const int64_t ranks = topology.Ranks();
  lane.queue_pairs = 2 * contexts * (nodes - 1);
  lane.queue_pairs_all = 2 * contexts * (ranks - 1);
  lane.barrier_steps = contexts * nodes * nodes;
  lane.barrier_steps_all = contexts * ranks * ranks;
  lane.progress_threads = 1;
  return lane;
}

ProgramCounts CountProgram(const Program& program) {
  ProgramCounts counts;
  counts.operations = static_cast<int64_t>(program.operations.size());
  for (const Operation& op : program.operations) {
    const bool copies = op.kind == OpKind::kCopy || op.kind == OpKind::kMulticast;
    if (copies) counts.descriptors += static_cast<int64_t>(op.pieces.size());
    if (op.kind == OpKind::kZero) counts.zeroed_pieces += static_cast<int64_t>(op.pieces.size());
    if (op.kind == OpKind::kPut) {
      ++counts.transfers;
      counts.puts += static_cast<int64_t>(op.puts.size());
      for (const PutPiece& piece : op.puts) counts.put_bytes += piece.bytes;
    }
    if (op.kind == OpKind::kSignal && op.peer != program.rank) ++counts.signals;
    if (op.kind == OpKind::kWait) ++counts.waits;
    if (op.kind == OpKind::kLand) ++counts.landings;
    counts.sums += static_cast<int64_t>(op.sums.size());
  }
  return counts;
}

}  // namespace tide
