// A simulation for a request in JSON.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "plan/report_request.h"
#include "plan/sizing.h"
#include "tide/error.h"
#include "tide/sim.h"

namespace tide {
namespace {

using Json = nlohmann::ordered_json;

// Tasks grow with the square of the ranks: 64 x 8 take about a minute.
constexpr int kMostRanks = 1024;
constexpr double kMilli = 1e3;  // seconds to milliseconds
constexpr double kMicro = 1e6;  // and to microseconds

AllGatherOptions AllGatherOf(const SizedGroup& group, const SimulationReportOptions& options) {
  AllGatherOptions chosen = options.all_gather;
  for (size_t p = 0; p < group.shard_dtypes.size(); ++p) {
    const bool cast = group.shard_dtypes[p] != group.layout.params()[p].shape.dtype;
    chosen.resident = chosen.resident && !cast;
  }
  return chosen;
}

ReduceScatterOptions ReduceScatterOf(const SizingRequest& request, const SizedGroup& group,
                                     const SimulationReportOptions& options) {
  ReduceScatterOptions chosen = options.reduce_scatter;
  chosen.placement = request.placement.value_or(chosen.placement);
  chosen.mode = request.mode.value_or(chosen.mode);
  chosen.wave_width = request.wave_width.value_or(chosen.wave_width);
  chosen.round_width = request.round_width.value_or(chosen.round_width);
  chosen.passes = request.topology.nodes == 1 ? 1 : request.passes.value_or(chosen.passes);
  chosen.check_interrupt = options.simulation.check_interrupt;
  if (request.chunk_bytes) {
    chosen.staging.slot_bytes = *request.chunk_bytes;
    chosen.staging.node_bytes = 0;
  }
  chosen.staging.slot_bytes = StagingSlotBytes(
      StagedBytes(group.layout, group.spec), chosen.staging, request.topology, chosen.round_width);
  return chosen;
}

// What `tide plan` refuses is refused here, too, but for switch reduction: without it landings read
// siblings over NVLink, as on the fabric.
void CheckPlan(const SizingRequest& request, const ReduceScatterOptions& defaults) {
  internal::CheckRequest(request);
  if (request.wave_width) {
    internal::ChooseWaveWidth(request, request.placement.value_or(defaults.placement));
  }
  if (request.mode != Mode::kSlotReuse) return;
  const std::string obstacle = internal::SlotReuseObstacle(request.groups);
  if (!obstacle.empty()) throw Error(ErrorCode::kInvalidArgument, obstacle);
}

SizingRequest ParseSimulated(const std::string& request_json,
                             const SimulationReportOptions& options) {
  SizingRequest request = internal::ParseReportRequest(request_json).sizing;
  CheckPlan(request, options.reduce_scatter);
  const Topology& topology = request.topology;
  if (topology.Ranks() <= kMostRanks) return request;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("nodes * local_ranks: expected at most {} ranks to simulate, got {} * {} "
                          "= {}; `tide plan` has no such limit",
                          kMostRanks, topology.nodes, topology.local_ranks, topology.Ranks()));
}

template <typename Plan>
std::vector<Program> OfAllRanks(const Topology& topology, const SimulationReportOptions& options,
                                const Plan& plan) {
  std::vector<Program> programs(static_cast<size_t>(topology.Ranks()));
  for (int rank = 0; rank < topology.Ranks(); ++rank) {
    options.simulation.check_interrupt();
    programs[static_cast<size_t>(rank)] = plan(rank);
  }
  return programs;
}

std::vector<Program> AllGathers(const SizingRequest& request, const SizedGroup& group,
                                const SimulationReportOptions& options, bool refresh = false) {
  AllGatherOptions chosen = AllGatherOf(group, options);
  chosen.refresh = refresh;
  return OfAllRanks(request.topology, options, [&](int rank) {
    return PlanAllGather(group.layout, group.shard_dtypes, request.topology, rank, chosen);
  });
}

std::vector<Program> ReduceScatters(const SizingRequest& request, const SizedGroup& group, int bank,
                                    const SimulationReportOptions& options) {
  const ReduceScatterOptions chosen = ReduceScatterOf(request, group, options);
  ReduceScatterSpec spec = group.spec;
  spec.bank = bank;
  return OfAllRanks(request.topology, options, [&](int rank) {
    return PlanReduceScatter(group.layout, spec, request.topology, rank, chosen);
  });
}

Json HeadOf(const std::string& operation, const SizingRequest& request) {
  return {{"operation", operation},
          {"machine", request.machine.name},
          {"nodes", request.topology.nodes},
          {"local_ranks", request.topology.local_ranks},
          {"ranks", request.topology.Ranks()},
          {"rows", Json::array()}};
}

int64_t GradientBytes(const SizedGroup& group) {
  int64_t bytes = 0;
  for (size_t i = 0; i < group.spec.params.size(); ++i) {
    const ParamShape& shape =
        group.layout.params()[static_cast<size_t>(group.spec.params[i])].shape;
    bytes +=
        shape.rows * shape.row_elems * static_cast<int64_t>(ItemSize(group.spec.grad_dtypes[i]));
  }
  return bytes;
}

Json SpanJson(const SimulatedSpan& span) {
  return {{"rank", span.rank},
          {"stream", span.stream},
          {"what", span.what},
          {"start_us", span.start_s * kMicro},
          {"end_us", span.end_s * kMicro},
          {"bytes", span.bytes}};
}

Json SpansJson(const std::vector<SimulatedSpan>& spans) {
  Json list = Json::array();
  for (const SimulatedSpan& span : spans) list.push_back(SpanJson(span));
  return list;
}

// Of every kind the rank that has most to do with it.
std::map<std::string, SimulatedResource> Busiest(const SimulationResult& result) {
  std::map<std::string, SimulatedResource> busiest;
  for (const SimulatedResource& resource : result.resources) {
    SimulatedResource& known = busiest[resource.name];
    if (resource.share_of > known.share_of) known = resource;
  }
  return busiest;
}

// The time that the busiest link or rail takes at its full rate.
void AddFloor(const std::map<std::string, SimulatedResource>& busiest, double seconds, Json* row) {
  double floor = 0;
  std::string name;
  for (const char* wire : {"NVLink out", "NVLink in", "rail out", "rail in"}) {
    const auto found = busiest.find(wire);
    if (found == busiest.end() || found->second.share_of * seconds <= floor) continue;
    floor = found->second.share_of * seconds;
    name = wire;
  }
  (*row)["floor_ms"] = floor * kMilli;
  (*row)["floor_of"] = name;
  (*row)["over_floor"] = floor > 0 ? Json(seconds / floor) : Json();
}

// Of the streams of one name that of the rank that waited longest at a time.
Json WaitsJson(const std::vector<SimulatedWait>& waits) {
  std::map<std::string, SimulatedWait> worst;
  for (const SimulatedWait& wait : waits) {
    SimulatedWait& known = worst[wait.stream];
    if (wait.longest_s > known.longest_s) known = wait;
  }
  Json list = Json::array();
  for (const auto& [stream, wait] : worst) {
    list.push_back({{"stream", stream},
                    {"rank", wait.rank},
                    {"longest_us", wait.longest_s * kMicro},
                    {"waited_us", wait.waited_s * kMicro},
                    {"before", wait.before},
                    {"cause", wait.cause}});
  }
  return list;
}

Json RowOf(const std::string& name, const SimulationResult& result, bool timeline) {
  Json row = {{"group", name},
              {"ms", result.seconds * kMilli},
              {"first_rank_ms",
               *std::min_element(result.rank_seconds.begin(), result.rank_seconds.end()) * kMilli}};
  const auto busiest = Busiest(result);
  AddFloor(busiest, result.seconds, &row);
  row["limits"] = Json::array();
  for (const SimulatedLimit& limit : result.limits) {
    row["limits"].push_back({{"name", limit.name},
                             {"ms", limit.seconds * kMilli},
                             {"part", limit.seconds / result.seconds}});
  }
  row["resources"] = Json::array();
  for (const auto& [kind, resource] : busiest) {
    row["resources"].push_back({{"name", kind},
                                {"rank", resource.rank},
                                {"busy_ms", resource.busy_s * kMilli},
                                {"bytes", resource.bytes},
                                {"used", resource.share_of}});
  }
  row["waits"] = WaitsJson(result.waits);
  row["critical_path"] = SpansJson(result.critical_path);
  if (timeline) row["timeline"] = SpansJson(result.timeline);
  return row;
}

}  // namespace

std::string SimulationReport(const std::string& request_json, const std::string& operation,
                             const SimulationReportOptions& options) {
  if (operation != "all-gather" && operation != "reduce-scatter") {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("operation: expected all-gather or reduce-scatter, got '{}'", operation));
  }
  const SizingRequest sizing = ParseSimulated(request_json, options);
  Json report = HeadOf(operation, sizing);
  for (const SizedGroup& group : sizing.groups) {
    const auto programs = operation == "all-gather" ? AllGathers(sizing, group, options)
                                                    : ReduceScatters(sizing, group, 0, options);
    const auto result = Simulate(programs, sizing.machine, options.simulation);
    report["rows"].push_back(RowOf(group.layout.name(), result, options.timeline));
  }
  return report.dump(1);
}

std::string StepReport(const std::string& request_json, const TrainingStep& step,
                       const SimulationReportOptions& options) {
  CheckStep(step);
  SizingRequest request = ParseSimulated(request_json, options);
  if (request.groups.size() != 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("groups: expected one, that of every layer, got {}", request.groups.size()));
  }
  TrainingStep asked = step;
  asked.mode = request.mode.value_or(step.mode);
  request.mode = asked.mode;
  const SizedGroup& group = request.groups[0];
  LayerPrograms layer;
  layer.all_gather = AllGathers(request, group, options);
  const bool refreshes = asked.keep_landings && request.topology.nodes == 1;
  if (refreshes) layer.refresh = AllGathers(request, group, options, /*refresh=*/true);
  for (int bank = 0; bank < (request.topology.nodes > 1 ? 2 : 1); ++bank) {
    layer.reduce_scatter[bank] = ReduceScatters(request, group, bank, options);
  }
  layer.gradient_bytes = GradientBytes(group);
  const auto result = SimulateStep(layer, asked, request.machine, options.simulation);
  Json report = HeadOf("training step", request);
  report["mode"] = Name(asked.mode);
  report["layers"] = asked.layers;
  report["refreshed"] = refreshes ? std::min(asked.landing_slots, asked.layers) : 0;
  report["compute_ms"] =
      (asked.layers * (asked.forward_s + asked.backward_s) + asked.optimizer_s) * kMilli;
  report["rows"].push_back(RowOf(group.layout.name(), result, options.timeline));
  return report.dump(1);
}

}  // namespace tide
