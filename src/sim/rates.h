// A machine model in SI units, and the flow of each kind of operation on it.
#ifndef TIDE_SIM_RATES_H_
#define TIDE_SIM_RATES_H_

#include <cstdint>
#include <vector>

#include "sim/sharing.h"
#include "tide/machine.h"

namespace tide::sim {

class Rates {
 public:
  // Throws Error(kInvalidArgument) if the model lacks a number or has fewer multiprocessors than
  // sum_ctas. 0: as the fabric chooses.
  Rates(const MachineModel& machine, int sum_ctas);

  // Of `ranks` ranks, by ResourceOf.
  std::vector<double> Capacities(int ranks) const;

  // A batch of copies: reads the source's memory, writes the destination's.
  Flow Copy(int from, int to, double bytes, bool pitched) const;
  Flow Put(int from, int to, double bytes) const;
  // A kernel of `rank` that reads and writes bytes of the listed ranks' memory. It adds
  // `sources` operands on average; a cast, or a refresh, has one.
  struct Access {
    int rank = 0;
    double bytes = 0;
  };
  Flow Kernel(int rank, const std::vector<Access>& accesses, double sources, bool cast) const;
  // The caller's kernels: `seconds` of memory traffic at this rate.
  Flow Compute(int rank, double seconds, double gb_per_s) const;
  Flow Zero(int rank, double bytes) const;

  // Seconds of a kernel that copies this much at the memory's rate.
  double ElementwiseCopy(double bytes) const { return 2 * bytes / (memory_gb_per_s() * 1e9); }
  double memory_gb_per_s() const { return machine_.hbm_gb_per_s; }

  // Seconds.
  double batch() const { return us(machine_.batch_us); }
  double copy(bool pitched) const { return us(pitched ? machine_.pitched_us : machine_.copy_us); }
  double signal() const { return us(machine_.signal_us); }
  double signal_flight() const { return us(machine_.signal_flight_us); }
  double wait() const { return us(machine_.wait_us); }
  double event() const { return us(machine_.event_us); }
  double kernel() const { return us(machine_.kernel_us); }
  double put() const { return us(machine_.put_us); }
  double put_flight() const { return us(machine_.put_flight_us); }
  double put_wait() const { return us(machine_.put_wait_us); }
  // Signals of a group follow all its data, where copy engines move it.
  bool signals_follow_group() const { return machine_.rails_over_nvlink; }

 private:
  static double us(double value) { return value * 1e-6; }

  const MachineModel machine_;
  const int multiprocessors_;
  const int sum_ctas_;
};

}  // namespace tide::sim

#endif  // TIDE_SIM_RATES_H_
