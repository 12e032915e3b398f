// What the command `tide sim` asks of the core.
#include "tide/sim.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "plan.h"
#include "signals.h"
#include "tide/config.h"

namespace nb = nanobind;

namespace {

// A plan that a request leaves open is the one that the fabric would take.
tide::SimulationReportOptions FabricOptions(int64_t sum_ctas, bool pacing, bool timeline) {
  const tide::CommunicatorOptions fabric = tide::OptionsFromEnvironment(tide::FabricKind::kNccl);
  tide::SimulationReportOptions options;
  options.all_gather = fabric.all_gather;
  options.reduce_scatter = fabric.reduce_scatter;
  options.simulation.sum_ctas =
      sum_ctas > 0 ? static_cast<int>(std::min<int64_t>(sum_ctas, INT32_MAX)) : fabric.sum_ctas;
  options.simulation.pacing = pacing;
  options.simulation.check_interrupt = &CheckSignals;
  options.timeline = timeline;
  return options;
}

std::string Simulate(const std::string& request, const std::string& operation, int64_t sum_ctas,
                     bool pacing, bool timeline) {
  const auto options = FabricOptions(sum_ctas, pacing, timeline);
  const nb::gil_scoped_release release;
  return tide::SimulationReport(request, operation, options);
}

std::string SimulateStep(const std::string& request, int layers, double forward_ms,
                         double backward_ms, double optimizer_ms, double compute_gb_per_s,
                         bool early, bool kept, int slots, bool timeline) {
  tide::TrainingStep step;
  step.layers = layers;
  step.forward_s = forward_ms * 1e-3;
  step.backward_s = backward_ms * 1e-3;
  step.optimizer_s = optimizer_ms * 1e-3;
  step.compute_gb_per_s = compute_gb_per_s;
  step.early_all_gather = early;
  step.keep_landings = kept;
  step.landing_slots = slots;
  const auto options = FabricOptions(0, true, timeline);
  const nb::gil_scoped_release release;
  return tide::StepReport(request, step, options);
}

nb::list MachineNumbers(const std::string& machine) {
  nb::list rows;
  for (const tide::MachineNumber& number : tide::NumbersOf(tide::MachineFromJson(machine))) {
    nb::dict row;
    row["name"] = number.name;
    row["unit"] = number.unit;
    row["value"] = number.value;
    row["meaning"] = number.meaning;
    row["source"] = number.source;
    rows.append(row);
  }
  return rows;
}

}  // namespace

void BindSim(nb::module_& m) {
  m.def("simulate", &Simulate, nb::arg("request"), nb::arg("operation"), nb::arg("sum_ctas") = 0,
        nb::arg("pacing") = true, nb::arg("timeline") = false,
        "A request in JSON to the simulated times of a collective in JSON.");
  m.def("simulate_step", &SimulateStep, nb::arg("request"), nb::arg("layers"),
        nb::arg("forward_ms"), nb::arg("backward_ms"), nb::arg("optimizer_ms") = 0,
        nb::arg("compute_gb_per_s") = 0, nb::arg("early") = true, nb::arg("kept") = false,
        nb::arg("slots") = 2, nb::arg("timeline") = false,
        "A training step of equal layers, each the request's only group, in JSON.");
  m.def(
      "machine_json",
      [](const std::string& name) { return tide::ToJson(tide::MachinePreset(name)); },
      nb::arg("name"), "A preset in JSON.");
  m.def("machine_numbers", &MachineNumbers, nb::arg("machine"),
        "The numbers of a machine in JSON, each with unit, meaning and source.");
}
