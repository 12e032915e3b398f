// The rules of the sizing solver, one function an equation (paper, appendix G).
#ifndef TIDE_PLAN_SIZING_H_
#define TIDE_PLAN_SIZING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tide/sizing.h"

namespace tide::internal {

// What one group asks of a lane, bytes of one rank.
struct GroupBytes {
  int64_t shard = 0;         // S
  int64_t fp32 = 0;          // S_fp32
  int64_t grad = 0;          // S_grad
  int64_t grad_item = 0;     // b_grad: the widest
  bool cast = false;         // a shard differs from the gather dtype, or isn't resident
  bool mixed_grads = false;  // of several dtypes
  bool narrow_output = false;
};
GroupBytes BytesOf(const SizedGroup& group, bool resident);

// t_NIC: seconds on the wire of one rail. Expert lanes send gradients as they are.
double WireSeconds(const MachineModel& machine, const Topology& topology, const GroupBytes& bytes);

// C_sum (equation 13). An expert lane reads each arriving block once and adds to its output.
int SumCtas(const MachineModel& machine, const Topology& topology, int64_t grad_item);

// GB/s, read plus written, at which sums keep up with what arrives: on one node through the links,
// on several through the rail, with the reserve against skew of equation 13.
double NeededSumGbPerS(const MachineModel& machine, const Topology& topology, int64_t grad_item);

// C_mc (equation 14).
int LandingCtas(const MachineModel& machine, double wire_seconds, int64_t fp32_bytes, int passes);

// k: from min(2, M-1) it doubles up to k_max while waits take more than a tenth of the wire time
// and doubling saves rounds.
struct RoundWidth {
  int k = 1;
  int rounds = 0;  // a pass
  std::string why;
};
RoundWidth ChooseRoundWidth(const MachineModel& machine, const Topology& topology, int wave_width,
                            int passes, double wire_seconds);

// A value and why it is not another.
template <typename T>
struct Chosen {
  T value;
  std::string why;
};

// Among the counts of sum_added the least that keeps up, or another that keeps up and adds less
// compute time beyond noise; on several nodes at least equation 13. The fastest if none keeps up.
// Throws Error(kInvalidArgument) if the machine has no curves or added times.
Chosen<int> ChooseSumCtas(const MachineModel& machine, const Topology& topology, int64_t grad_item);

// Throws Error(kInvalidArgument) for what does not depend on the machine.
void CheckRequest(const SizingRequest& request);
// latin_square where the switch reduces, else direct. Throws Error(kInvalidArgument) if it was
// asked for and cannot be had.
Chosen<Placement> ChoosePlacement(const SizingRequest& request);
// The widest, or the one asked for. Throws Error(kInvalidArgument) with the allowed ones.
Chosen<int> ChooseWaveWidth(const SizingRequest& request, Placement placement);
// Why gradients can't move into a landing slot, or empty.
std::string SlotReuseObstacle(const std::vector<SizedGroup>& groups);

// "12.5 MiB".
std::string HumanBytes(int64_t bytes);

}  // namespace tide::internal

#endif  // TIDE_PLAN_SIZING_H_
