// Machine models: numbers by name, JSON in and out.
#include "tide/machine.h"

#include <algorithm>
#include <cstdint>

#include "plan/json_reader.h"
#include "tide/plan.h"

namespace tide {
namespace {

using internal::JsonField;

constexpr double kMaxRate = 1e9;  // GB/s; anything above is a unit mistake
constexpr double kMaxTime = 1e6;  // us or ms
constexpr int kMaxCtas = 1 << 16;

// The five that have no default: sizing divides by the rates.
constexpr size_t kRequired = 5;

struct Number {
  const char* name;
  const char* unit;
  const char* meaning;
  double MachineModel::*value;
  double low;
  double high;
};

const std::vector<Number>& Numbers() {
  using M = MachineModel;
  static const std::vector<Number> numbers = {
      {"nic_gb_per_s", "GB/s", "one rail, one direction, sustained", &M::nic_gb_per_s, 0, kMaxRate},
      {"sum_gb_per_s", "GB/s", "a sum on one CTA, read plus written", &M::sum_gb_per_s, 0,
       kMaxRate},
      {"land_gb_per_s", "GB/s", "fp32 output of a landing on one CTA", &M::land_gb_per_s, 0,
       kMaxRate},
      {"land_cap_gb_per_s", "GB/s", "all landing CTAs together", &M::land_cap_gb_per_s, 0,
       kMaxRate},
      {"round_wait_ms", "ms", "waits for peers, a round", &M::round_wait_ms, 0, kMaxTime},
      {"skew_factor", "", "reserve of the sum against skew", &M::skew_factor, 1, 100},
      {"tail_fraction", "", "last landing, of the wire time", &M::tail_fraction, 1e-6, 1},
      {"nvlink_gb_per_s", "GB/s", "copy engines to peers, each direction", &M::nvlink_gb_per_s, 0,
       kMaxRate},
      {"hbm_gb_per_s", "GB/s", "memory of one GPU, read plus written", &M::hbm_gb_per_s, 0,
       kMaxRate},
      {"local_copy_gb_per_s", "GB/s", "copy from own to own memory", &M::local_copy_gb_per_s, 0,
       kMaxRate},
      {"local_pitched_gb_per_s", "GB/s", "the same with a pitch", &M::local_pitched_gb_per_s, 0,
       kMaxRate},
      {"multiprocessors", "", "of one GPU", &M::multiprocessors, 0, 1e4},
      {"sum_ctas", "", "CTAs of a sum, as a calibration chose", &M::sum_ctas, 0, kMaxCtas},
      {"batch_us", "us", "start of a batch of copies", &M::batch_us, 0, kMaxTime},
      {"copy_us", "us", "each copy of a batch", &M::copy_us, 0, kMaxTime},
      {"pitched_us", "us", "each pitched copy of a batch", &M::pitched_us, 0, kMaxTime},
      {"signal_us", "us", "write by a memory operation of a stream", &M::signal_us, 0, kMaxTime},
      {"signal_flight_us", "us", "until the waiting GPU sees it", &M::signal_flight_us, 0,
       kMaxTime},
      {"wait_us", "us", "wait by a memory operation, at least", &M::wait_us, 0, kMaxTime},
      {"event_us", "us", "from an event to a stream that awaits it", &M::event_us, 0, kMaxTime},
      {"kernel_us", "us", "start and end of a kernel", &M::kernel_us, 0, kMaxTime},
      {"put_us", "us", "start of a group of puts and signals between nodes", &M::put_us, 0,
       kMaxTime},
      {"put_flight_us", "us", "from its end to the peer's sight of the signal", &M::put_flight_us,
       0, kMaxTime},
      {"put_wait_us", "us", "wait for signals between nodes, at least", &M::put_wait_us, 0,
       kMaxTime},
  };
  return numbers;
}

std::vector<std::string> Fields() {
  std::vector<std::string> fields = {"base",       "name",          "max_round_width",
                                     "contexts",   "staging_slots", "multicast_reduction",
                                     "sources",    "chunk_bytes",   "rails_over_nvlink",
                                     "sum_curves", "sum_added"};
  for (const Number& number : Numbers()) fields.emplace_back(number.name);
  return fields;
}

void ReadNumbers(const JsonField& root, MachineModel* machine, bool complete) {
  for (size_t i = 0; i < Numbers().size(); ++i) {
    const Number& number = Numbers()[i];
    if (!root.Has(number.name) && (complete || i >= kRequired)) continue;
    const JsonField field = root.At(number.name);
    const double value = field.Number(number.low, number.high);
    const bool rate = std::string(number.unit) == "GB/s";
    if (value == 0 && rate && i < kRequired) field.Fail("a rate above 0");
    machine->*number.value = value;
    machine->sources.erase(number.name);  // that of the base is no longer true
  }
}

std::vector<SumCurve> ReadCurves(const JsonField& field) {
  std::vector<SumCurve> curves;
  for (const JsonField& item : field.Items()) {
    item.AllowOnly({"sources", "points"});
    SumCurve curve;
    curve.sources = static_cast<int>(item.At("sources").Integer(1, 1 << 16));
    if (!curves.empty() && curve.sources <= curves.back().sources) {
      item.At("sources").Fail("curves by rising sources");
    }
    for (const JsonField& point : item.At("points").Items()) {
      const std::vector<JsonField> pair = point.Items();
      if (pair.size() != 2) point.Fail("[CTAs, GB/s]");
      const auto ctas = static_cast<int>(pair[0].Integer(1, kMaxCtas));
      if (!curve.points.empty() && ctas <= curve.points.back().ctas) {
        pair[0].Fail("points by rising CTAs");
      }
      curve.points.push_back({ctas, pair[1].Number(1e-3, kMaxRate)});
    }
    if (curve.points.empty()) item.At("points").Fail("at least one point");
    curves.push_back(std::move(curve));
  }
  return curves;
}

std::vector<AddedTime> ReadAdded(const JsonField& field) {
  std::vector<AddedTime> times;
  for (const JsonField& item : field.Items()) {
    const std::vector<JsonField> parts = item.Items();
    if (parts.size() != 3) item.Fail("[CTAs, ms, ms of noise]");
    const auto ctas = static_cast<int>(parts[0].Integer(1, kMaxCtas));
    if (!times.empty() && ctas <= times.back().ctas) parts[0].Fail("times by rising CTAs");
    // Noise may make compute faster beside a sum.
    times.push_back({ctas, parts[1].Number(-kMaxTime, kMaxTime), parts[2].Number(0, kMaxTime)});
  }
  return times;
}

double AtCtas(const SumCurve& curve, int ctas) {
  const auto& points = curve.points;
  if (ctas >= points.back().ctas) return points.back().gb_per_s;
  const auto next = std::find_if(points.begin(), points.end(),
                                 [&](const SumCurve::Point& point) { return point.ctas >= ctas; });
  if (next == points.begin()) return next->gb_per_s * ctas / next->ctas;
  const SumCurve::Point& before = *(next - 1);
  const double part = static_cast<double>(ctas - before.ctas) / (next->ctas - before.ctas);
  return before.gb_per_s + part * (next->gb_per_s - before.gb_per_s);
}

}  // namespace

bool MachineModel::can_simulate() const {
  return nvlink_gb_per_s > 0 && hbm_gb_per_s > 0 && local_copy_gb_per_s > 0 &&
         local_pitched_gb_per_s > 0 && multiprocessors >= 1 && nic_gb_per_s > 0 &&
         !sum_curves.empty();
}

double MachineModel::SumGbPerS(double sources_added, int ctas) const {
  const auto next = std::find_if(sum_curves.begin(), sum_curves.end(), [&](const SumCurve& curve) {
    return curve.sources >= sources_added;
  });
  if (next == sum_curves.end()) return AtCtas(sum_curves.back(), ctas);
  if (next == sum_curves.begin()) return AtCtas(*next, ctas);
  const SumCurve& before = *(next - 1);
  const double part = (sources_added - before.sources) / (next->sources - before.sources);
  const double below = AtCtas(before, ctas);
  return below + part * (AtCtas(*next, ctas) - below);
}

std::vector<MachineNumber> NumbersOf(const MachineModel& machine) {
  std::vector<MachineNumber> rows;
  for (const Number& number : Numbers()) {
    const auto source = machine.sources.find(number.name);
    rows.push_back({number.name, number.unit, number.meaning, machine.*number.value,
                    source == machine.sources.end() ? "" : source->second});
  }
  return rows;
}

MachineModel MachineFromJson(const std::string& json) {
  const nlohmann::json document = internal::ParseJson(json, "machine");
  const JsonField root(document, "machine");
  root.AllowOnly(Fields());
  const auto has = [&root](const char* key) { return root.Has(key); };
  const auto integer = [&root](const char* key) {
    return static_cast<int>(root.At(key).Integer(1, 64));
  };
  MachineModel machine;
  if (has("base")) machine = MachinePreset(root.At("base").String());
  ReadNumbers(root, &machine, /*complete=*/has("base"));
  if (has("name")) machine.name = root.At("name").String();
  if (has("max_round_width")) machine.max_round_width = integer("max_round_width");
  if (has("multicast_reduction")) {
    machine.multicast_reduction = root.At("multicast_reduction").Bool();
  }
  if (has("contexts")) machine.contexts = integer("contexts");
  if (has("staging_slots")) machine.staging_slots = integer("staging_slots");
  if (has("chunk_bytes")) {
    machine.chunk_bytes = root.At("chunk_bytes").Integer(kStagingAlignment, INT64_MAX);
  }
  if (has("rails_over_nvlink")) machine.rails_over_nvlink = root.At("rails_over_nvlink").Bool();
  if (has("sum_curves")) machine.sum_curves = ReadCurves(root.At("sum_curves"));
  if (has("sum_added")) machine.sum_added = ReadAdded(root.At("sum_added"));
  if (has("sources")) {
    std::vector<std::string> known = {"sum_curves", "sum_added"};
    for (const Number& number : Numbers()) known.emplace_back(number.name);
    const JsonField sources = root.At("sources");
    sources.AllowOnly(known);
    for (const std::string& name : known) {
      if (sources.Has(name.c_str())) machine.sources[name] = sources.At(name.c_str()).String();
    }
  }
  return machine;
}

std::string ToJson(const MachineModel& machine) {
  nlohmann::ordered_json json = {{"name", machine.name}};
  for (const Number& number : Numbers()) json[number.name] = machine.*number.value;
  json["max_round_width"] = machine.max_round_width;
  json["multicast_reduction"] = machine.multicast_reduction;
  json["contexts"] = machine.contexts;
  json["staging_slots"] = machine.staging_slots;
  json["chunk_bytes"] = machine.chunk_bytes;
  json["rails_over_nvlink"] = machine.rails_over_nvlink;
  json["sum_curves"] = nlohmann::ordered_json::array();
  for (const SumCurve& curve : machine.sum_curves) {
    nlohmann::ordered_json points = nlohmann::ordered_json::array();
    for (const SumCurve::Point& point : curve.points) {
      points.push_back({point.ctas, point.gb_per_s});
    }
    json["sum_curves"].push_back({{"sources", curve.sources}, {"points", points}});
  }
  json["sum_added"] = nlohmann::ordered_json::array();
  for (const AddedTime& added : machine.sum_added) {
    json["sum_added"].push_back({added.ctas, added.ms, added.noise_ms});
  }
  json["sources"] = machine.sources;
  return json.dump(1);
}

}  // namespace tide
