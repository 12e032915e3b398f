#include "plan/report_request.h"

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "plan/json_reader.h"
#include "tide/error.h"

namespace tide::internal {
namespace {

constexpr int64_t kMaxNodes = 1 << 16;
constexpr int64_t kMaxLocalRanks = 1 << 8;
constexpr int64_t kMaxElems = int64_t{1} << 44;  // of one parameter: bytes of all ranks fit 64 bits

int ToInt(const JsonField& field, int64_t low, int64_t high) {
  return static_cast<int>(field.Integer(low, high));
}

DType ToDType(const JsonField& field) {
  const std::string name = field.String();
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    if (name == Name(dtype)) return dtype;
  }
  field.Fail("bf16, fp16 or fp32");
}

// Ranks of the same node follow each other, nodes in order, all of one size.
void CheckNodeMajor(const JsonField& field, const Topology& topology) {
  const std::vector<JsonField> nodes = field.Items();
  if (static_cast<int>(nodes.size()) != topology.Ranks()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: expected the node of each of {} ranks, got {} entries",
                            field.path(), topology.Ranks(), nodes.size()));
  }
  std::vector<int> ranks_on(static_cast<size_t>(topology.nodes), 0);
  for (const JsonField& node : nodes) {
    ++ranks_on[static_cast<size_t>(node.Integer(0, topology.nodes - 1))];
  }
  for (int n = 0; n < topology.nodes; ++n) {
    const int count = ranks_on[static_cast<size_t>(n)];
    if (count == topology.local_ranks) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: nodes must be equal: expected {} ranks on node {}, got {}",
                            field.path(), topology.local_ranks, n, count));
  }
  for (int rank = 0; rank < topology.Ranks(); ++rank) {
    const JsonField& node = nodes[static_cast<size_t>(rank)];
    if (node.Integer(0, topology.nodes - 1) == topology.Node(rank)) continue;
    node.Fail(fmt::format("node {} for rank {} (ranks must be node-major, r = n * L + l)",
                          topology.Node(rank), rank));
  }
}

Topology ParseTopology(const JsonField& root) {
  Topology topology;
  topology.nodes = ToInt(root.At("nodes"), 1, kMaxNodes);
  topology.local_ranks = ToInt(root.At("local_ranks"), 1, kMaxLocalRanks);
  if (root.Has("ranks")) {
    const int64_t ranks = root.At("ranks").Integer(1, INT64_MAX);
    if (ranks != topology.Ranks()) {
      root.At("ranks").Fail(fmt::format("nodes * local_ranks = {} * {} = {}", topology.nodes,
                                        topology.local_ranks, topology.Ranks()));
    }
  }
  if (root.Has("rank_nodes")) CheckNodeMajor(root.At("rank_nodes"), topology);
  return topology;
}

ParamShape ParseShape(const JsonField& field) {
  ParamShape shape;
  shape.name = field.At("name").String();
  shape.rows = field.At("rows").Integer(0, kMaxElems);
  shape.row_elems = field.At("row_elems").Integer(0, kMaxElems);
  shape.dtype = ToDType(field.At("dtype"));
  if (shape.row_elems > 0 && shape.rows > kMaxElems / shape.row_elems) {
    field.Fail(fmt::format("at most {} elements", kMaxElems));
  }
  return shape;
}

SizedGroup ParseGroup(const JsonField& field, const Topology& topology, DType output_dtype) {
  field.AllowOnly({"name", "params"});
  std::vector<ParamShape> shapes;
  std::vector<DType> shard_dtypes;
  ReduceScatterSpec spec;
  spec.output_dtype = output_dtype;
  for (const JsonField& param : field.At("params").Items()) {
    param.AllowOnly({"name", "rows", "row_elems", "dtype", "shard_dtype", "grad_dtype"});
    shapes.push_back(ParseShape(param));
    const DType dtype = shapes.back().dtype;
    shard_dtypes.push_back(param.Has("shard_dtype") ? ToDType(param.At("shard_dtype")) : dtype);
    spec.params.push_back(static_cast<int>(spec.params.size()));
    spec.grad_dtypes.push_back(param.Has("grad_dtype") ? ToDType(param.At("grad_dtype")) : dtype);
  }
  if (shapes.empty()) field.At("params").Fail("at least one parameter");
  return {GroupLayout(field.At("name").String(), shapes, topology.Ranks()), std::move(shard_dtypes),
          std::move(spec)};
}

// Nothing for "auto".
std::optional<Mode> ToMode(const JsonField& field) {
  const std::string word = field.String();
  for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
    if (word == Name(mode)) return mode;
  }
  if (word != "auto") field.Fail("in_place, slot_reuse or auto");
  return std::nullopt;
}

std::optional<Placement> ToPlacement(const JsonField& field) {
  const std::string word = field.String();
  for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
    if (word == Name(placement)) return placement;
  }
  if (word != "auto") field.Fail("direct, latin_square or auto");
  return std::nullopt;
}

void ParseOptions(const JsonField& field, SizingRequest& request) {
  field.AllowOnly({"mode", "placement", "wave_width", "round_width", "passes", "chunk_bytes",
                   "memory_limit_bytes", "resident", "output_dtype"});
  // Rules of a plan are checked, and explained, by CheckRequest and ChooseSizes.
  const auto option = [&field](const char* key, int64_t low, int64_t high) -> std::optional<int> {
    if (!field.Has(key)) return std::nullopt;
    return ToInt(field.At(key), low, high);
  };
  if (field.Has("mode")) request.mode = ToMode(field.At("mode"));
  if (field.Has("placement")) request.placement = ToPlacement(field.At("placement"));
  request.wave_width = option("wave_width", INT32_MIN, INT32_MAX);
  request.round_width = option("round_width", -kMaxNodes, kMaxNodes);
  request.passes = option("passes", INT32_MIN, INT32_MAX);
  if (field.Has("chunk_bytes")) {
    request.chunk_bytes = field.At("chunk_bytes").Integer(0, INT64_MAX);
  }
  if (field.Has("memory_limit_bytes")) {
    request.memory_limit_bytes = field.At("memory_limit_bytes").Integer(1, INT64_MAX);
  }
  if (field.Has("resident")) request.resident = field.At("resident").Bool();
}

DType OutputDType(const JsonField& root) {
  if (!root.Has("options") || !root.At("options").Has("output_dtype")) return DType::kF32;
  return ToDType(root.At("options").At("output_dtype"));
}

MachineModel ParseMachine(const JsonField& field) {
  if (field.IsString()) return MachinePreset(field.String());
  return MachineFromJson(field.Dump());
}

}  // namespace

ReportRequest ParseReportRequest(const std::string& json) {
  const nlohmann::json document = ParseJson(json, "plan");
  const JsonField root(document, "");
  root.AllowOnly(ReportRequestFields());
  ReportRequest request;
  request.sizing.topology = ParseTopology(root);
  request.sizing.machine = ParseMachine(root.At("machine"));
  if (root.Has("options")) ParseOptions(root.At("options"), request.sizing);
  const DType output = OutputDType(root);
  for (const JsonField& group : root.At("groups").Items()) {
    request.sizing.groups.push_back(ParseGroup(group, request.sizing.topology, output));
  }
  if (request.sizing.groups.empty()) root.At("groups").Fail("at least one group");
  if (root.Has("rank")) {
    request.rank = ToInt(root.At("rank"), 0, request.sizing.topology.Ranks() - 1);
  }
  return request;
}

}  // namespace tide::internal
