// What the command `tide verify` asks of the core.
#include "tide/verify.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "plan.h"
#include "plan/report_request.h"
#include "signals.h"
#include "tide/sizing.h"
#include "verify/mutate.h"
#include "verify/sequence.h"

namespace nb = nanobind;

namespace {

// The plans that `tide plan` would choose for the request.
tide::VerifySetup MakeSetup(const std::string& request) {
  const tide::SizingRequest sizing = tide::internal::ParseReportRequest(request).sizing;
  const tide::Sizing chosen = tide::ChooseSizes(sizing);
  tide::VerifySetup setup;
  setup.topology = sizing.topology;
  setup.all_gather = chosen.all_gather;
  setup.reduce_scatter = chosen.reduce_scatter;
  for (const tide::SizedGroup& group : sizing.groups) {
    setup.groups.push_back({group.layout, group.shard_dtypes, group.spec});
    // Only a group whose shards need no cast can keep them in the arena.
    for (size_t p = 0; p < group.shard_dtypes.size(); ++p) {
      const bool cast = group.shard_dtypes[p] != group.layout.params()[p].shape.dtype;
      setup.all_gather.resident = setup.all_gather.resident && !cast;
    }
  }
  return setup;
}

// Tiny transfers are striped and have heads, too.
void SplitTransfers(tide::VerifySetup* setup) {
  setup->all_gather.min_stripe_bytes = setup->reduce_scatter.min_stripe_bytes = 64;
  setup->all_gather.head_bytes = 256;
}

// `lanes`: "all_gather", "reduce_scatter", "training" (both lanes, overlapping).
nb::dict VerifyPlans(const std::string& request, const std::vector<std::string>& lanes,
                     bool node_landing) {
  tide::VerifyResult result;
  {
    const nb::gil_scoped_release release;
    tide::VerifySetup setup = MakeSetup(request);
    tide::VerifyOptions options;
    options.check_interrupt = setup.reduce_scatter.check_interrupt = &CheckSignals;
    if (node_landing) options.landing = tide::LandingModel::kNode;
    for (const std::string& lane : lanes) {
      result.Add(lane == "all_gather"       ? tide::VerifyAllGather(setup, options)
                 : lane == "reduce_scatter" ? tide::VerifyReduceScatter(setup, options)
                                            : tide::VerifyTraining(setup, options));
    }
  }
  nb::dict answer;
  answer["ok"] = result.ok();
  nb::list findings;
  for (const tide::Finding& finding : result.findings) findings.append(tide::ToText(finding));
  answer["findings"] = findings;
  answer["sequences"] = result.stats.sequences;
  answer["calls"] = result.stats.calls;
  answer["operations"] = result.stats.operations;
  answer["accesses"] = result.stats.accesses;
  answer["pairs"] = result.stats.pairs;
  return answer;
}

nb::list MutatePlans(const std::string& request, const std::vector<int>& ranks,
                     const std::optional<nb::callable>& give_up) {
  tide::VerifyOptions options;
  options.check_interrupt = [&give_up] {
    CheckSignals();
    const nb::gil_scoped_acquire gil;
    if (give_up) (*give_up)();
  };
  tide::verify::MutationTable table;
  {
    const nb::gil_scoped_release release;
    tide::VerifySetup setup = MakeSetup(request);
    SplitTransfers(&setup);
    tide::verify::ProgramCache cache(setup, options.check_interrupt);
    const auto model = tide::LandingModel::kRank;
    table =
        tide::verify::RunMutation(tide::verify::AllGatherSequences(&cache, model), ranks, options);
    if (setup.topology.nodes == 1) {
      table.Add(
          tide::verify::RunMutation(tide::verify::RefreshSequences(&cache, model), ranks, options));
    }
    table.Add(tide::verify::RunMutation(tide::verify::ReduceScatterSequences(&cache, model), ranks,
                                        options));
  }
  nb::list rows;
  for (size_t kind = 0; kind < table.rows.size(); ++kind) {
    const auto& row = table.rows[kind];
    nb::dict entry;
    entry["kind"] = tide::verify::Name(static_cast<tide::verify::MutantKind>(kind));
    entry["injected"] = row.injected;
    entry["detected"] = row.detected;
    entry["explained"] = row.explained;
    entry["undetected"] = row.undetected;
    rows.append(entry);
  }
  return rows;
}

}  // namespace

void BindVerify(nb::module_& m) {
  m.def("verify_plans", &VerifyPlans, nb::arg("request"), nb::arg("lanes"),
        nb::arg("node_landing") = false,
        "Proves the programs of a request in JSON safe, or lists what is wrong.");
  m.def("mutate_plans", &MutatePlans, nb::arg("request"), nb::arg("ranks"),
        nb::arg("give_up") = nb::none(),
        "Injects every mistake in turn into the programs of these ranks. `give_up` is called now "
        "and then on the calling thread and may raise.");
}
