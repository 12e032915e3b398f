#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tide/error.h"
#include "tide/sizing.h"

namespace tide {
namespace {

using Json = nlohmann::json;

Json Request() {
  return Json::parse(R"({
    "nodes": 2, "local_ranks": 2, "machine": "paper-8-nodes",
    "groups": [{"name": "layer", "params": [
      {"name": "weight", "rows": 12, "row_elems": 64, "dtype": "bf16"},
      {"name": "bias", "rows": 5, "row_elems": 1, "dtype": "bf16"}]}]
  })");
}

std::string Refusal(const std::string& request) {
  try {
    PlanReport(request);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

void ExpectRefusal(const Json& request, const std::string& part) {
  const std::string message = Refusal(request.dump());
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Report, CountsTheProgramsOfTheRank) {
  Json request = Request();
  request["rank"] = 3;
  const Json report = Json::parse(PlanReport(request.dump()));
  EXPECT_EQ(report["ranks"], 4);
  EXPECT_EQ(report["options"]["placement"], "latin_square");
  const GroupLayout layout("layer",
                           {{"weight", 12, 64, DType::kBF16}, {"bias", 5, 1, DType::kBF16}}, 4);
  const Topology topology{2, 2};
  ReduceScatterOptions options;
  options.placement = Placement::kLatinSquare;
  options.wave_width = report["options"]["wave_width"];
  options.round_width = report["options"]["round_width"];
  options.staging = {report["options"]["chunk_bytes"], report["options"]["staging_slots"]};
  const ReduceScatterSpec spec{.params = {0, 1}, .grad_dtypes = {DType::kBF16, DType::kBF16}};
  const Program program = PlanReduceScatter(layout, spec, topology, 3, options);
  const ProgramCounts counts = CountProgram(program);
  const Json& row = report["groups"][0]["reduce_scatter"];
  EXPECT_EQ(row["operations"], counts.operations);
  EXPECT_EQ(row["descriptors"], counts.descriptors);
  EXPECT_EQ(row["puts"], counts.puts);
  EXPECT_EQ(row["signals"], counts.signals);
  EXPECT_GT(counts.descriptors, 0);
  EXPECT_GT(counts.puts, 0);
  const RegionBytes regions = ReduceScatterRegions(layout, spec, topology, options);
  for (const Json& region : report["regions"]) {
    if (region["name"] == "reduce-scatter") {
      EXPECT_EQ(region["bytes"], regions.reduce_scatter());
    }
  }
}

TEST(Report, NamesTheOffendingField) {
  EXPECT_NE(Refusal("{").find("plan: expected JSON"), std::string::npos);
  Json request = Request();
  request["groups"][0]["params"][1]["rows"] = "many";
  ExpectRefusal(
      request,
      "groups[0].params[1].rows: expected an integer in [0, 17592186044416], got \"many\"");
  request = Request();
  request["groups"][0]["params"][1]["rows"] = -1;
  ExpectRefusal(request, "groups[0].params[1].rows");
  request = Request();
  request["groups"][0]["params"][0].erase("dtype");
  ExpectRefusal(request, "groups[0].params[0].dtype: missing");
  request = Request();
  request["groups"][0]["params"][0]["dtype"] = "int8";
  ExpectRefusal(request, "groups[0].params[0].dtype: expected bf16, fp16 or fp32, got \"int8\"");
  request = Request();
  request["groups"][0]["parms"] = 1;
  ExpectRefusal(request, "groups[0].parms: unknown field; expected one of name, params");
  request = Request();
  request["groups"] = Json::array();
  ExpectRefusal(request, "groups: expected at least one group");
  request = Request();
  request["groups"] = 7;
  ExpectRefusal(request, "groups: expected a list, got 7");
  ExpectRefusal(Json::array(), "the document: expected an object");
  request = Request();
  request["options"]["mode"] = "fast";
  ExpectRefusal(request, "options.mode: expected in_place, slot_reuse or auto, got \"fast\"");
  request = Request();
  request["options"]["passes"] = 1.5;
  ExpectRefusal(request, "options.passes: expected an integer");
  request = Request();
  request["groups"][0]["params"][0]["rows"] = int64_t{1} << 40;
  request["groups"][0]["params"][0]["row_elems"] = int64_t{1} << 40;
  ExpectRefusal(request, "groups[0].params[0]: expected at most");
}

TEST(Report, RanksAreNodeMajorAndNodesEqual) {
  Json request = Request();
  request["ranks"] = 5;
  ExpectRefusal(request, "ranks: expected nodes * local_ranks = 2 * 2 = 4, got 5");
  request = Request();
  request["rank_nodes"] = {0, 0, 1, 1};
  EXPECT_NO_THROW(PlanReport(request.dump()));
  request["rank_nodes"] = {0, 1, 0, 1};
  ExpectRefusal(request, "rank_nodes[1]: expected node 0 for rank 1 (ranks must be node-major");
  request["rank_nodes"] = {0, 0, 0, 1};
  ExpectRefusal(request, "nodes must be equal: expected 2 ranks on node 0, got 3");
  request["rank_nodes"] = {0, 0, 1};
  ExpectRefusal(request, "rank_nodes: expected the node of each of 4 ranks, got 3 entries");
  request["rank_nodes"] = {0, 0, 1, 2};
  ExpectRefusal(request, "rank_nodes[3]: expected an integer in [0, 1], got 2");
  request = Request();
  request["rank"] = 4;
  ExpectRefusal(request, "rank: expected an integer in [0, 3], got 4");
}

TEST(Machine, JsonRoundTrips) {
  MachineModel machine = MachinePreset("paper-8-nodes");
  machine.name = "other";
  machine.chunk_bytes = 4096;
  machine.multicast_reduction = false;
  machine.skew_factor = 2.25;
  const MachineModel back = MachineFromJson(ToJson(machine));
  EXPECT_EQ(ToJson(back), ToJson(machine));
  EXPECT_EQ(back.chunk_bytes, 4096);
  EXPECT_FALSE(back.multicast_reduction);
}

TEST(Machine, EveryPresetIsKnown) {
  for (const std::string& name : MachinePresets()) {
    EXPECT_EQ(MachinePreset(name).name, name);
    EXPECT_EQ(ToJson(MachineFromJson(ToJson(MachinePreset(name)))), ToJson(MachinePreset(name)));
  }
}

TEST(Machine, OverridesAPreset) {
  const MachineModel machine = MachineFromJson(
      R"({"base": "h200", "nvlink_gb_per_s": 300, "signal_us": 1, "sources": {"signal_us": "a"}})");
  EXPECT_EQ(machine.nvlink_gb_per_s, 300);
  EXPECT_EQ(machine.hbm_gb_per_s, MachinePreset("h200").hbm_gb_per_s);
  EXPECT_EQ(machine.sources.count("nvlink_gb_per_s"), 0U);  // no longer what was measured
  EXPECT_EQ(machine.sources.at("signal_us"), "a");
  EXPECT_TRUE(machine.can_simulate());
}

TEST(Machine, EveryNumberOfAPresetHasASource) {
  for (const std::string& name : MachinePresets()) {
    for (const MachineNumber& number : NumbersOf(MachinePreset(name))) {
      const bool rule = number.name == "skew_factor" || number.name == "tail_fraction";
      EXPECT_EQ(number.source.empty(), rule) << name << ", " << number.name;
    }
  }
}

TEST(Machine, InterpolatesSums) {
  MachineModel machine;
  machine.sum_curves = {{2, {{4, 40}, {8, 60}}}, {8, {{4, 80}}}};
  EXPECT_EQ(machine.SumGbPerS(2, 2), 20);
  EXPECT_EQ(machine.SumGbPerS(2, 6), 50);
  EXPECT_EQ(machine.SumGbPerS(2, 100), 60);
  EXPECT_EQ(machine.SumGbPerS(1, 4), 40);
  EXPECT_EQ(machine.SumGbPerS(5, 4), 60);
  EXPECT_EQ(machine.SumGbPerS(20, 4), 80);
}

TEST(Machine, RefusesCurvesInDisorder) {
  Json request = Request();
  request["machine"] = Json::parse(ToJson(MachinePreset("h200")));
  request["machine"]["sum_curves"][0]["points"] = {{8, 10}, {8, 20}};
  ExpectRefusal(request, "machine.sum_curves[0].points[1][0]: expected points by rising CTAs");
  request["machine"]["sum_curves"][0]["points"] = Json::array();
  ExpectRefusal(request, "machine.sum_curves[0].points: expected at least one point");
  request["machine"]["sum_curves"] = {{{"sources", 2}, {"points", {{1, 1}}}},
                                      {{"sources", 2}, {"points", {{1, 1}}}}};
  ExpectRefusal(request, "machine.sum_curves[1].sources: expected curves by rising sources");
}

TEST(Machine, NamesTheOffendingField) {
  Json request = Request();
  request["machine"] = "laptop";
  ExpectRefusal(
      request,
      "machine: expected a JSON file or one of h200, h200-400g, paper-8-nodes, got 'laptop'");
  request["machine"] = Json::parse(ToJson(MachinePreset("paper-8-nodes")));
  EXPECT_NO_THROW(PlanReport(request.dump()));
  request["machine"]["nic_gb_per_s"] = 0;
  ExpectRefusal(request, "machine.nic_gb_per_s: expected a rate above 0, got 0");
  request["machine"]["nic_gb_per_s"] = "fast";
  ExpectRefusal(request, "machine.nic_gb_per_s: expected a number");
  request["machine"].erase("nic_gb_per_s");
  ExpectRefusal(request, "machine.nic_gb_per_s: missing");
  request["machine"] = Json::parse(ToJson(MachinePreset("paper-8-nodes")));
  request["machine"]["speed"] = 1;
  ExpectRefusal(request, "machine.speed: unknown field");
}

}  // namespace
}  // namespace tide
