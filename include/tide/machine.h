// Rates of a machine: what sizing and simulation know about it.
//
//   MachineModel machine = MachinePreset("h200");
//   MachineModel slower = MachineFromJson(R"({"base": "h200", "nvlink_gb_per_s": 300})");
//   for (const MachineNumber& number : NumbersOf(machine)) ...  // unit, meaning and source of each
//
// Every number says where it comes from. GB are 10^9 bytes, us and ms are of wall time.
#ifndef TIDE_MACHINE_H_
#define TIDE_MACHINE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tide {

// Speed of a kernel that adds `sources` operands (1: a cast) by its number of thread blocks, bytes
// read plus bytes written. Between points it is interpolated; before the first it is proportional.
struct SumCurve {
  struct Point {
    int ctas = 0;
    double gb_per_s = 0;
  };
  int sources = 1;
  std::vector<Point> points;  // by rising ctas
};

// Compute time that a sum on so many thread blocks adds to what runs beside it; the bytes that are
// summed are the same for every number.
struct AddedTime {
  int ctas = 0;
  double ms = 0;
  double noise_ms = 0;  // differences within it say nothing
};

struct MachineModel {
  std::string name = "unnamed";

  // First-order rates of the sizing rules (paper, appendix G).
  double nic_gb_per_s = 0;       // BW_NIC: sustained, one rail, one direction
  double sum_gb_per_s = 0;       // BW_sum: one CTA, logical reads plus writes of level 1
  double land_gb_per_s = 0;      // BW_land: one CTA, fp32 output of a landing
  double land_cap_gb_per_s = 0;  // BW_cap: all landing CTAs together
  double round_wait_ms = 0;      // t_rnd: waits for peers, a round
  double skew_factor = 1.5;      // gamma_skew
  double tail_fraction = 0.05;   // eta_tail: last landing, of the wire time
  int max_round_width = 4;       // k_max
  // The switch can reduce over a multicast address, and this is not switched off.
  bool multicast_reduction = false;
  int contexts = 4;               // RMA contexts of a rail communicator
  int staging_slots = 2;          // n_stg
  int64_t chunk_bytes = 1 << 26;  // staging slot of one peer, at most

  // What the simulator asks beyond these (docs/simulation.md); 0 where nobody has said.
  double nvlink_gb_per_s = 0;         // copy engines to a peer, each direction of a GPU
  double hbm_gb_per_s = 0;            // memory of one GPU, reads plus writes
  double local_copy_gb_per_s = 0;     // a copy from own to own memory: bytes copied
  double local_pitched_gb_per_s = 0;  // the same with a pitch
  double multiprocessors = 0;
  double batch_us = 0;          // start of a batch of copies
  double copy_us = 0;           // each copy of it
  double pitched_us = 0;        // each pitched copy
  double signal_us = 0;         // a write by a memory operation of a stream
  double signal_flight_us = 0;  // until the waiting GPU sees it
  double wait_us = 0;           // a wait, at least
  double event_us = 0;          // from an event to a stream that awaits it
  double kernel_us = 0;         // start and end of a kernel
  double put_us = 0;            // start of a group of puts and signals between nodes
  double put_flight_us = 0;     // from its end to the peer's sight of the signal
  double put_wait_us = 0;       // a wait for such signals, at least
  // Nodes are virtual: rails are NVLink, too, and puts share it with the copies of a node.
  bool rails_over_nvlink = false;
  std::vector<SumCurve> sum_curves;  // by rising sources
  std::vector<AddedTime> sum_added;  // by rising ctas
  // What a calibration chose from these two; 0: nothing has been chosen.
  double sum_ctas = 0;

  // Where each number comes from, by name.
  std::map<std::string, std::string> sources;

  // Whether the simulator has all that it needs.
  bool can_simulate() const;
  // Bytes a second, read plus written, of a kernel that adds `sources_added` operands.
  double SumGbPerS(double sources_added, int ctas) const;
};

struct MachineNumber {
  std::string name;
  std::string unit;
  std::string meaning;
  double value = 0;
  std::string source;  // empty: nobody has said
};
// All plain numbers of the model, in order; curves and flags are not among them.
std::vector<MachineNumber> NumbersOf(const MachineModel& machine);

// Names of the presets, in alphabetical order.
std::vector<std::string> MachinePresets();
// Throws Error(kInvalidArgument) for an unknown name, with the known ones.
MachineModel MachinePreset(const std::string& name);
// A model, or what differs from the preset named in the field `base`. Throws
// Error(kInvalidArgument) with the path of the offending field.
MachineModel MachineFromJson(const std::string& json);
std::string ToJson(const MachineModel& machine);

}  // namespace tide

#endif  // TIDE_MACHINE_H_
