// A machine of round numbers, and programs for it.
#ifndef TIDE_TESTS_SIM_TOY_H_
#define TIDE_TESTS_SIM_TOY_H_

#include <string>
#include <vector>

#include "plan/builder.h"
#include "testing/programs.h"
#include "tide/machine.h"
#include "tide/plan.h"
#include "tide/program.h"

namespace tide::testing {

inline constexpr double kMicro = 1e-6;

inline MachineModel Toy() {
  MachineModel toy;
  toy.name = "toy";
  toy.nvlink_gb_per_s = 100;
  toy.hbm_gb_per_s = 1000;
  toy.local_copy_gb_per_s = 200;
  toy.local_pitched_gb_per_s = 50;
  toy.multiprocessors = 8;
  toy.nic_gb_per_s = 40;
  toy.batch_us = 1;
  toy.copy_us = 2;
  toy.pitched_us = 3;
  toy.signal_us = 4;
  toy.signal_flight_us = 5;
  toy.wait_us = 6;
  toy.event_us = 7;
  toy.kernel_us = 8;
  toy.put_us = 9;
  toy.put_flight_us = 10;
  toy.put_wait_us = 11;
  toy.sum_curves = {{1, {{8, 400}}}, {2, {{1, 25}, {2, 50}, {4, 100}}}};
  return toy;
}

inline void Copy(internal::Builder& builder, int queue, int peer, int buffer, int64_t bytes) {
  Operation& copy = builder.Add(queue, OpKind::kCopy);
  copy.peer = peer;
  copy.pieces.push_back({{buffer, 0}, {buffer, 0}, bytes});
}

inline void Put(internal::Builder& builder, int queue, int peer, int buffer, int64_t bytes,
                int context = 0) {
  Operation& put = builder.Add(queue, OpKind::kPut);
  put.peer = peer;
  put.puts.push_back({{buffer, 0}, {buffer, 0}, bytes, context, CounterKind::kArrived, context});
}

inline GroupLayout Layer(const Topology& topology) {
  const std::vector<ParamShape> shapes = {{"w", 4096, 4096, DType::kBF16},
                                          {"v", 1000, 3000, DType::kBF16},
                                          {"norm", 4096, 1, DType::kBF16}};
  return {"layer", shapes, topology.Ranks()};
}

inline std::vector<Program> AllGathers(const Topology& topology,
                                       const AllGatherOptions& options = {},
                                       DType shards = DType::kBF16) {
  const GroupLayout layout = Layer(topology);
  const std::vector<DType> dtypes(layout.params().size(), shards);
  std::vector<Program> programs;
  for (int rank = 0; rank < topology.Ranks(); ++rank) {
    programs.push_back(PlanAllGather(layout, dtypes, topology, rank, options));
  }
  return programs;
}

inline ReduceScatterSpec WholeLayer() {
  ReduceScatterSpec spec;
  spec.params = {0, 1, 2};
  spec.grad_dtypes.assign(3, DType::kBF16);
  return spec;
}

inline std::vector<Program> ReduceScatters(const Topology& topology,
                                           ReduceScatterOptions options = {}) {
  const GroupLayout layout = Layer(topology);
  if (options.staging.slot_bytes == 0) options.staging = {int64_t{1} << 20, 2, int64_t{1} << 18};
  std::vector<Program> programs;
  for (int rank = 0; rank < topology.Ranks(); ++rank) {
    programs.push_back(PlanReduceScatter(layout, WholeLayer(), topology, rank, options));
  }
  return programs;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_SIM_TOY_H_
