#include "plan.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "signals.h"
#include "tide/sizing.h"

namespace nb = nanobind;

namespace {

nb::dict VerifyExhaustive(int max_nodes, int local_ranks, const std::vector<int>& round_widths,
                          const std::vector<int>& passes) {
  tide::ExhaustiveOptions options;
  options.max_nodes = max_nodes;
  options.local_ranks = local_ranks;
  options.round_widths = round_widths;
  options.passes = passes;
  options.check_interrupt = &CheckSignals;
  tide::ExhaustiveResult result;
  {
    const nb::gil_scoped_release release;
    result = tide::VerifyExhaustive(options);
  }
  nb::dict answer;
  answer["pairs"] = result.pairs;
  answer["rejected_pairs"] = result.rejected.size();
  nb::list rejected;
  for (const tide::RejectedPair& pair : result.rejected) {
    rejected.append(nb::make_tuple(pair.nodes, pair.wave_width, pair.contributor, pair.other));
  }
  answer["rejected"] = rejected;
  answer["variants"] = result.variants;
  answer["accepted_plans"] = result.accepted_plans;
  answer["rejected_plans"] = result.rejected_plans;
  answer["failed_plans"] = result.failed_plans;
  answer["failures"] = result.failures;
  return answer;
}

}  // namespace

void BindPlan(nb::module_& m) {
  m.def(
      "plan_report",
      [](const std::string& request) { return tide::PlanReport(request, &CheckSignals); },
      nb::arg("request"), nb::call_guard<nb::gil_scoped_release>(),
      "A request in JSON to a sized plan in JSON.");
  m.def("request_fields", &tide::ReportRequestFields, "The fields of such a request.");
  m.def("machine_presets", &tide::MachinePresets);
  m.def("verify_exhaustive", &VerifyExhaustive, nb::arg("max_nodes"), nb::arg("local_ranks"),
        nb::arg("round_widths"), nb::arg("passes"));
}
