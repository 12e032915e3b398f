#include <fmt/format.h>

#include "sim/rates.h"
#include "sim/summary.h"
#include "sim/translate.h"
#include "tide/error.h"
#include "tide/sim.h"

namespace tide {
namespace {

void CheckArguments(const std::vector<Program>& programs, const SimulationOptions& options) {
  for (size_t i = 0; i < programs.size(); ++i) {
    if (programs[i].rank == static_cast<int>(i) &&
        programs[i].topology.Ranks() == static_cast<int>(programs.size())) {
      continue;
    }
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("simulation: expected the programs of ranks 0 to {} in order, got that "
                    "of rank {} of {} as number {}",
                    programs.size() - 1, programs[i].rank, programs[i].topology.Ranks(), i));
  }
  if (programs.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "simulation: expected a program a rank, got none");
  }
  if (!options.ready_s.empty() && options.ready_s.size() != programs.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("simulation: expected a time of readiness a rank, got {} for {}",
                            options.ready_s.size(), programs.size()));
  }
}

std::vector<Program> WithoutPacing(std::vector<Program> programs) {
  for (Program& program : programs) {
    std::erase_if(program.operations, [](const Operation& op) { return op.sync == Sync::kPacing; });
  }
  return programs;
}

}  // namespace

SimulationResult Simulate(const std::vector<Program>& programs, const MachineModel& machine,
                          const SimulationOptions& options) {
  CheckArguments(programs, options);
  const sim::Rates rates(machine, options.sum_ctas);
  sim::Translator translator(programs[0].topology, rates, options.check_interrupt);
  std::vector<int> ready(programs.size(), sim::kNoTask);
  for (size_t rank = 0; rank < options.ready_s.size(); ++rank) {
    const int caller = translator.AddStream(static_cast<int>(rank), "caller");
    ready[rank] = translator.AddDelay(caller, options.ready_s[rank], "gets ready");
  }
  const auto ends = translator.AddCall(options.pacing ? programs : WithoutPacing(programs), ready);
  const auto capacities = rates.Capacities(static_cast<int>(programs.size()));
  const auto outcome = sim::RunTasks(translator, capacities, options.check_interrupt);
  return sim::Summarise(translator, outcome, capacities, ends);
}

}  // namespace tide
