#include "sim/rates.h"

#include <fmt/format.h>

#include <algorithm>

#include "tide/communicator.h"
#include "tide/error.h"

namespace tide::sim {
namespace {

constexpr double kGiga = 1e9;

const MachineModel& Checked(const MachineModel& machine) {
  if (machine.can_simulate()) return machine;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("machine '{}': expected rates of NVLink, memory, copies, rails and sums "
                          "for a simulation; a file may take those that it lacks from a preset "
                          "(field base)",
                          machine.name));
}

int CheckedCtas(const MachineModel& machine, int sum_ctas) {
  const auto most = static_cast<int>(machine.multiprocessors);
  const auto calibrated = static_cast<int>(machine.sum_ctas);
  if (sum_ctas == 0) sum_ctas = calibrated > 0 ? calibrated : DefaultSumCtas(most);
  if (sum_ctas > 0 && sum_ctas <= most) return sum_ctas;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("sum CTAs: expected 0 to {}, the multiprocessors of machine '{}', got {}",
                          most, machine.name, sum_ctas));
}

}  // namespace

Rates::Rates(const MachineModel& machine, int sum_ctas)
    : machine_(Checked(machine)),
      multiprocessors_(static_cast<int>(machine.multiprocessors)),
      sum_ctas_(CheckedCtas(machine, sum_ctas)) {}

std::vector<double> Rates::Capacities(int ranks) const {
  std::vector<double> capacities(static_cast<size_t>(ranks * kResourceKinds));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto set = [&](ResourceKind kind, double capacity) {
      capacities[static_cast<size_t>(ResourceOf(rank, kind))] = capacity;
    };
    set(ResourceKind::kLinkOut, machine_.nvlink_gb_per_s * kGiga);
    set(ResourceKind::kLinkIn, machine_.nvlink_gb_per_s * kGiga);
    set(ResourceKind::kMemory, machine_.hbm_gb_per_s * kGiga);
    set(ResourceKind::kSms, multiprocessors_);
    set(ResourceKind::kRailOut, machine_.nic_gb_per_s * kGiga);
    set(ResourceKind::kRailIn, machine_.nic_gb_per_s * kGiga);
  }
  return capacities;
}

Flow Rates::Copy(int from, int to, double bytes, bool pitched) const {
  if (from == to) {
    const double rate = pitched ? machine_.local_pitched_gb_per_s : machine_.local_copy_gb_per_s;
    return {bytes, rate * kGiga, {{ResourceOf(from, ResourceKind::kMemory), 2}}};
  }
  return {bytes,
          machine_.nvlink_gb_per_s * kGiga,
          {{ResourceOf(from, ResourceKind::kLinkOut), 1},
           {ResourceOf(to, ResourceKind::kLinkIn), 1},
           {ResourceOf(from, ResourceKind::kMemory), 1},
           {ResourceOf(to, ResourceKind::kMemory), 1}}};
}

Flow Rates::Put(int from, int to, double bytes) const {
  Flow flow{bytes,
            machine_.nic_gb_per_s * kGiga,
            {{ResourceOf(from, ResourceKind::kRailOut), 1},
             {ResourceOf(to, ResourceKind::kRailIn), 1},
             {ResourceOf(from, ResourceKind::kMemory), 1},
             {ResourceOf(to, ResourceKind::kMemory), 1}}};
  if (machine_.rails_over_nvlink) {
    flow.uses.push_back({ResourceOf(from, ResourceKind::kLinkOut), 1});
    flow.uses.push_back({ResourceOf(to, ResourceKind::kLinkIn), 1});
  }
  return flow;
}

Flow Rates::Kernel(int rank, const std::vector<Access>& accesses, double sources, bool cast) const {
  const int ctas = cast ? multiprocessors_ : sum_ctas_;
  Flow flow;
  for (const Access& access : accesses) flow.bytes += access.bytes;
  flow.limit = machine_.SumGbPerS(sources, ctas) * kGiga;
  for (const Access& access : accesses) {
    const double part = access.bytes / flow.bytes;
    flow.uses.push_back({ResourceOf(access.rank, ResourceKind::kMemory), part});
    if (access.rank == rank) continue;
    flow.uses.push_back({ResourceOf(access.rank, ResourceKind::kLinkOut), part});
    flow.uses.push_back({ResourceOf(rank, ResourceKind::kLinkIn), part});
  }
  flow.uses.push_back({ResourceOf(rank, ResourceKind::kSms), ctas / flow.limit});
  return flow;
}

Flow Rates::Compute(int rank, double seconds, double gb_per_s) const {
  const double rate = std::min(gb_per_s, machine_.hbm_gb_per_s) * kGiga;
  return {seconds * rate, rate, {{ResourceOf(rank, ResourceKind::kMemory), 1}}};
}

Flow Rates::Zero(int rank, double bytes) const {
  return {bytes, machine_.hbm_gb_per_s * kGiga, {{ResourceOf(rank, ResourceKind::kMemory), 1}}};
}

}  // namespace tide::sim
