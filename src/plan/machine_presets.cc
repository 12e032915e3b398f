// The machines that somebody has measured, each number with its source.
#include <fmt/format.h>

#include <utility>

#include "tide/error.h"
#include "tide/machine.h"

namespace tide {
namespace {

void Set(MachineModel* machine, const char* name, double MachineModel::*member, double value,
         const char* source) {
  machine->*member = value;
  machine->sources[name] = source;
}
// The member's name is the number's name.
#define TIDE_SET(member, value, source) Set(&machine, #member, &MachineModel::member, value, source)

constexpr const char* kKernels = "bench/results/h200-kernels-teams.json";

// Two H200s, NV18, without multicast. No number is fitted to a collective's time.
MachineModel H200() {
  MachineModel machine;
  machine.name = "h200";
  TIDE_SET(nvlink_gb_per_s, 391, "copy-engine push to a peer, both ways at once, 256 MiB");
  TIDE_SET(hbm_gb_per_s, 4245,
           "sum of 8 on 64 CTAs, the most that a kernel reaches (4800 nominal)");
  TIDE_SET(local_copy_gb_per_s, 2092, "cudaMemcpyAsync");
  TIDE_SET(local_pitched_gb_per_s, 831, "cudaMemcpy2DAsync");
  TIDE_SET(multiprocessors, 132, "data sheet");
  TIDE_SET(sum_ctas, 0, "not calibrated: a quarter of the multiprocessors");
  TIDE_SET(batch_us, 1.45, "copies of 4 KiB in a row take 2.5 us each; less copy_us");
  TIDE_SET(copy_us, 1.05, "a batch of 64 x 4 MiB reaches 359, of 256 x 1 MiB 283 of 395 GB/s");
  TIDE_SET(pitched_us, 2.7, "a pitched batch of 30 x 7 x 64 KiB reaches 118 GB/s, of 8 KiB 20");
  TIDE_SET(signal_us, 2.5, "cuStreamWriteValue64 in a row");
  TIDE_SET(wait_us, 1.3, "cuStreamWaitValue64 in a row, satisfied");
  TIDE_SET(signal_flight_us, 1.1, "two GPUs exchange a write and a wait in 4.9 us; less both");
  TIDE_SET(event_us, 1.3, "assumed: as a wait");
  TIDE_SET(kernel_us, 3, "assumed");
  TIDE_SET(nic_gb_per_s, 300, "ncclPutSignal of 256 MiB within a machine: 280 to 310");
  TIDE_SET(put_us, 8, "ncclSignal and its wait take 14 to 18 us together: half");
  TIDE_SET(put_wait_us, 8, "ncclSignal and its wait take 14 to 18 us together: half");
  TIDE_SET(put_flight_us, 0, "within put_us and put_wait_us");
  TIDE_SET(sum_gb_per_s, 97.6, kKernels);
  TIDE_SET(land_gb_per_s, 8.9, "h200-kernels.json: 89 GB/s of 40 bytes an element on 16 CTAs");
  TIDE_SET(land_cap_gb_per_s, 391.0 / 8, "no multicast: a landing reads 8 blocks over NVLink");
  TIDE_SET(round_wait_ms, 0.016, "ncclSignal and its wait");
  machine.rails_over_nvlink = true;
  machine.sum_curves = {
      {1, {{1, 58.4}, {16, 898}, {33, 1820}, {49, 2617}, {132, 3536}}},
      {2, {{1, 92.9}, {16, 1412}, {33, 2790}, {49, 2944}, {132, 3626}}},
      {8, {{1, 107.6}, {16, 1632}, {33, 3222}, {49, 3853}, {132, 4105}}},
  };
  machine.sources["sum_curves"] = kKernels;
  return machine;
}

constexpr const char* kRoundTrip =
    "paper, section 3.1: a signal's round trip takes 0.12 ms; a sixth";

void SetPaperRail(MachineModel* to) {
  MachineModel& machine = *to;
  TIDE_SET(nic_gb_per_s, 47.5, "paper, appendix G: one 400 Gb/s rail");
  TIDE_SET(round_wait_ms, 1.3, "paper, appendix G");
  TIDE_SET(put_us, 20, kRoundTrip);
  TIDE_SET(put_flight_us, 20, kRoundTrip);
  TIDE_SET(put_wait_us, 20, kRoundTrip);
  machine.rails_over_nvlink = false;
}

// H200s with the paper's network between nodes: nobody has measured the two together.
MachineModel H200Rails() {
  MachineModel machine = H200();
  machine.name = "h200-400g";
  SetPaperRail(&machine);
  return machine;
}

// Eight nodes of eight GPUs of 148 multiprocessors, one 400 Gb/s rail each. The paper has no rates
// of NVLink and memory: those are the data sheet's, times what an H200 reaches of its own.
MachineModel PaperEightNodes() {
  MachineModel machine = H200();
  for (auto& [name, source] : machine.sources) source.insert(0, "as h200: ");
  machine.name = "paper-8-nodes";
  SetPaperRail(&machine);
  TIDE_SET(sum_gb_per_s, 99, "paper, appendix G");
  TIDE_SET(land_gb_per_s, 21, "paper, appendix G");
  TIDE_SET(land_cap_gb_per_s, 90, "paper, appendix G");
  TIDE_SET(multiprocessors, 148, "paper, section 2.2");
  TIDE_SET(nvlink_gb_per_s, 782, "assumed: 900 nominal, times 391 / 450 of an H200");
  TIDE_SET(hbm_gb_per_s, 7075, "assumed: 8000 nominal, times 4245 / 4800 of an H200");
  TIDE_SET(local_copy_gb_per_s, 3487, "assumed: an H200's, times 8000 / 4800");
  TIDE_SET(local_pitched_gb_per_s, 1385, "assumed: an H200's, times 8000 / 4800");
  machine.multicast_reduction = true;
  machine.sum_curves = {{8, {{1, 99}, {71, 7029}}}};
  machine.sources["sum_curves"] = "paper, appendix G: 99 GB/s a CTA, up to the memory's rate";
  return machine;
}
#undef TIDE_SET

}  // namespace

std::vector<std::string> MachinePresets() { return {"h200", "h200-400g", "paper-8-nodes"}; }

MachineModel MachinePreset(const std::string& name) {
  if (name == "h200") return H200();
  if (name == "h200-400g") return H200Rails();
  if (name == "paper-8-nodes") return PaperEightNodes();
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("machine: expected a JSON file or one of {}, got '{}'",
                          fmt::join(MachinePresets(), ", "), name));
}

}  // namespace tide
