// A plan as JSON: sizes, regions, counts of one rank's programs, connections, reasons.
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "plan/doubling.h"
#include "plan/memory_model.h"
#include "plan/report_request.h"
#include "plan/sizing.h"
#include "tide/sizing.h"

namespace tide {
namespace {

using Json = nlohmann::ordered_json;

// What TIDE reserves beside what the formula allows, both also as parts of NS.
Json RegionRow(const std::string& name, int64_t bytes, int64_t formula, int64_t full_landing) {
  const auto share = [full_landing](int64_t part) {
    return full_landing > 0 ? static_cast<double>(part) / static_cast<double>(full_landing) : 0;
  };
  return {{"name", name},
          {"bytes", bytes},
          {"ns", share(bytes)},
          {"formula_bytes", formula},
          {"formula_ns", share(formula)}};
}

Json Regions(const Sizing& sizing) {
  const RegionBytes& own = sizing.reserved.regions;
  const RegionBytes& formula = sizing.formula.regions;
  Json rows = Json::array();
  const auto add = [&](const char* name, int64_t bytes, int64_t bound) {
    rows.push_back(RegionRow(name, bytes, bound, sizing.full_landing_bytes));
  };
  add("landings", sizing.reserved.landings, sizing.formula.landings);
  add("all-gather stage", own.stage, formula.stage);
  add("staging", own.staging, formula.staging);
  add("outbox", 2 * own.outbox, 2 * formula.outbox);
  add("spares", 2 * own.spare, 2 * formula.spare);
  add("inbox", own.generations * own.inbox, formula.generations * formula.inbox);
  add("accumulator", own.accumulator, formula.accumulator);
  add("reduce-scatter", own.reduce_scatter(), formula.reduce_scatter());
  add("gradients", sizing.reserved.gradients, sizing.formula.gradients);
  add("live", sizing.reserved.live(), sizing.formula.live());
  add("live in FSDP2", sizing.stock_live_bytes, sizing.stock_live_bytes);
  return rows;
}

Json Counts(const ProgramCounts& counts) {
  return {{"operations", counts.operations}, {"descriptors", counts.descriptors},
          {"transfers", counts.transfers},   {"puts", counts.puts},
          {"put_bytes", counts.put_bytes},   {"signals", counts.signals},
          {"waits", counts.waits},           {"sums", counts.sums},
          {"landings", counts.landings},     {"zeroed_pieces", counts.zeroed_pieces}};
}

Json GroupRow(const SizedGroup& group, int passes, const Sizing& sizing, const Topology& topology,
              int rank, const std::function<void()>& check_interrupt) {
  ReduceScatterOptions options = sizing.reduce_scatter;
  options.check_interrupt = check_interrupt;
  options.passes = passes;
  const internal::GroupBytes bytes = internal::BytesOf(group, true);
  const bool network = topology.nodes > 1;
  const auto waves = internal::CutIntoWaves(topology, options.wave_width).size();
  const auto rounds = internal::RoundsOf(topology, options.wave_width, options.round_width).size();
  const Program all_gather =
      PlanAllGather(group.layout, group.shard_dtypes, topology, rank, sizing.all_gather);
  const Program reduce_scatter =
      PlanReduceScatter(group.layout, group.spec, topology, rank, options);
  return {{"name", group.layout.name()},
          {"params", group.layout.params().size()},
          {"shard_bytes", bytes.shard},
          {"fp32_bytes", bytes.fp32},
          {"passes", passes},
          {"waves", network ? waves * static_cast<size_t>(passes) : 0},
          {"rounds", rounds * static_cast<size_t>(passes)},
          {"all_gather_rounds", internal::DoublingRounds(topology.nodes).size()},
          {"all_gather", Counts(CountProgram(all_gather))},
          {"reduce_scatter", Counts(CountProgram(reduce_scatter))}};
}

Json Connections(const Topology& topology, int contexts) {
  const LaneConnections lane = ConnectionsOf(topology, contexts);
  return {{"contexts", contexts},
          {"queue_pairs", lane.queue_pairs},
          {"queue_pairs_one_communicator", lane.queue_pairs_all},
          {"barrier_steps", lane.barrier_steps},
          {"barrier_steps_one_communicator", lane.barrier_steps_all},
          {"progress_threads", lane.progress_threads}};
}

Json Options(const Sizing& sizing) {
  const ReduceScatterOptions& options = sizing.reduce_scatter;
  return {{"mode", Name(options.mode)},
          {"placement", Name(options.placement)},
          {"resident", sizing.all_gather.resident},
          {"wave_width", options.wave_width},
          {"round_width", options.round_width},
          {"passes", options.passes},
          {"outbox_depth", sizing.outbox_depth},
          {"generations", sizing.generations},
          {"chunk_bytes", options.staging.slot_bytes},
          {"staging_slots", options.staging.slots},
          {"sum_ctas", sizing.sum_ctas},
          {"landing_ctas", sizing.landing_ctas}};
}

}  // namespace

std::vector<std::string> ReportRequestFields() {
  return {"groups", "nodes", "local_ranks", "ranks", "rank_nodes", "rank", "machine", "options"};
}

std::string PlanReport(const std::string& request_json,
                       const std::function<void()>& check_interrupt) {
  const internal::ReportRequest request = internal::ParseReportRequest(request_json);
  const Topology& topology = request.sizing.topology;
  const Sizing sizing = ChooseSizes(request.sizing);
  Json groups = Json::array();
  for (size_t g = 0; g < request.sizing.groups.size(); ++g) {
    groups.push_back(GroupRow(request.sizing.groups[g], sizing.passes[g], sizing, topology,
                              request.rank, check_interrupt));
  }
  Json choices = Json::array();
  for (const Choice& choice : sizing.choices) {
    choices.push_back({{"what", choice.what}, {"value", choice.value}, {"why", choice.why}});
  }
  const Json report = {{"nodes", topology.nodes},
                       {"local_ranks", topology.local_ranks},
                       {"ranks", topology.Ranks()},
                       {"rank", request.rank},
                       {"machine", Json::parse(ToJson(request.sizing.machine))},
                       {"options", Options(sizing)},
                       {"full_landing_bytes", sizing.full_landing_bytes},
                       {"regions", Regions(sizing)},
                       {"connections", Connections(topology, request.sizing.machine.contexts)},
                       {"groups", std::move(groups)},
                       {"choices", std::move(choices)}};
  return report.dump(1);
}

}  // namespace tide
