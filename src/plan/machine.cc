// Machine models: presets, and JSON in and out.
#include <fmt/format.h>

#include <cstdint>

#include "plan/json_reader.h"
#include "tide/error.h"
#include "tide/sizing.h"

namespace tide {
namespace {

using internal::JsonField;

constexpr double kMaxRate = 1e9;  // GB/s; anything above is a unit mistake

// Eight nodes of eight GPUs, one 400 Gb/s rail each (paper, appendix G).
MachineModel PaperEightNodes() {
  MachineModel machine;
  machine.name = "paper-8-nodes";
  machine.nic_gb_per_s = 47.5;
  machine.sum_gb_per_s = 99;
  machine.land_gb_per_s = 21;
  machine.land_cap_gb_per_s = 90;
  machine.round_wait_ms = 1.3;
  machine.multicast_reduction = true;
  return machine;
}

// Rates divide.
double Rate(const JsonField& root, const char* key) {
  const JsonField field = root.At(key);
  const double rate = field.Number(0, kMaxRate);
  if (rate == 0) field.Fail("a rate above 0");
  return rate;
}

}  // namespace

std::vector<std::string> MachinePresets() { return {"paper-8-nodes"}; }

MachineModel MachinePreset(const std::string& name) {
  if (name == "paper-8-nodes") return PaperEightNodes();
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("machine: expected a JSON file or one of {}, got '{}'",
                          fmt::join(MachinePresets(), ", "), name));
}

MachineModel MachineFromJson(const std::string& json) {
  const nlohmann::json document = internal::ParseJson(json, "machine");
  const JsonField root(document, "machine");
  root.AllowOnly({"name", "nic_gb_per_s", "sum_gb_per_s", "land_gb_per_s", "land_cap_gb_per_s",
                  "round_wait_ms", "skew_factor", "tail_fraction", "max_round_width",
                  "multicast_reduction", "contexts", "staging_slots", "chunk_bytes"});
  MachineModel machine;
  machine.nic_gb_per_s = Rate(root, "nic_gb_per_s");
  machine.sum_gb_per_s = Rate(root, "sum_gb_per_s");
  machine.land_gb_per_s = Rate(root, "land_gb_per_s");
  machine.land_cap_gb_per_s = Rate(root, "land_cap_gb_per_s");
  machine.round_wait_ms = root.At("round_wait_ms").Number(0, 1e6);
  const auto has = [&root](const char* key) { return root.Has(key); };
  if (has("name")) machine.name = root.At("name").String();
  if (has("skew_factor")) machine.skew_factor = root.At("skew_factor").Number(1, 100);
  if (has("tail_fraction")) machine.tail_fraction = root.At("tail_fraction").Number(1e-6, 1);
  if (has("max_round_width")) {
    machine.max_round_width = static_cast<int>(root.At("max_round_width").Integer(1, 64));
  }
  if (has("multicast_reduction")) {
    machine.multicast_reduction = root.At("multicast_reduction").Bool();
  }
  if (has("contexts")) machine.contexts = static_cast<int>(root.At("contexts").Integer(1, 64));
  if (has("staging_slots")) {
    machine.staging_slots = static_cast<int>(root.At("staging_slots").Integer(1, 64));
  }
  if (has("chunk_bytes")) {
    machine.chunk_bytes = root.At("chunk_bytes").Integer(kStagingAlignment, INT64_MAX);
  }
  return machine;
}

std::string ToJson(const MachineModel& machine) {
  const nlohmann::ordered_json json = {
      {"name", machine.name},
      {"nic_gb_per_s", machine.nic_gb_per_s},
      {"sum_gb_per_s", machine.sum_gb_per_s},
      {"land_gb_per_s", machine.land_gb_per_s},
      {"land_cap_gb_per_s", machine.land_cap_gb_per_s},
      {"round_wait_ms", machine.round_wait_ms},
      {"skew_factor", machine.skew_factor},
      {"tail_fraction", machine.tail_fraction},
      {"max_round_width", machine.max_round_width},
      {"multicast_reduction", machine.multicast_reduction},
      {"contexts", machine.contexts},
      {"staging_slots", machine.staging_slots},
      {"chunk_bytes", machine.chunk_bytes},
  };
  return json.dump(1);
}

}  // namespace tide
