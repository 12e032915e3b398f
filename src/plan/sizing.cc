// Chooses the constants of a lane: what the caller leaves open is decided by the machine model and
// the memory limit, and every decision is written down.
#include "plan/sizing.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "plan/memory_model.h"
#include "plan/reduction_shape.h"
#include "plan/shard_span.h"
#include "tide/error.h"

namespace tide {
namespace {

using internal::GroupBytes;
using internal::HumanBytes;

constexpr int kMaxPasses = 4;                // more parts than this have not been checked
constexpr int64_t kMinChunkBytes = 1 << 20;  // no smaller chunk is chosen; it may be asked for

[[noreturn]] void Refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

int64_t CeilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }

// The larger of two lanes' regions, one by one: groups share them.
RegionBytes Larger(const RegionBytes& a, const RegionBytes& b) {
  return {std::max(a.stage, b.stage),
          std::max(a.staging, b.staging),
          std::max(a.outbox, b.outbox),
          std::max(a.spare, b.spare),
          std::max(a.inbox, b.inbox),
          std::max(a.generations, b.generations),
          std::max(a.accumulator, b.accumulator)};
}

class Solver {
 public:
  explicit Solver(const SizingRequest& request) : request_(request), topology_(request.topology) {
    internal::CheckRequest(request_);
    for (const SizedGroup& group : request_.groups) {
      bytes_.push_back(internal::BytesOf(group, request_.resident));
      if (bytes_.back().fp32 > bytes_[largest_].fp32) largest_ = bytes_.size() - 1;
      resident_ = resident_ && !bytes_.back().cast;
    }
    wire_seconds_ = internal::WireSeconds(request_.machine, topology_, Largest());
  }

  Sizing Solve() {
    AllGatherOptions& all_gather = sizing_.all_gather;
    all_gather.contexts = request_.machine.contexts;
    all_gather.resident = resident_;
    sizing_.reduce_scatter.contexts = request_.machine.contexts;
    ChoosePlacing();
    ChooseByMemory();
    ChooseBudgets();
    FillFormula();
    return std::move(sizing_);
  }

 private:
  // What the memory limit may change.
  struct Candidate {
    Mode mode = Mode::kInPlace;
    int passes = 1;
    int64_t chunk_bytes = 0;
  };

  const GroupBytes& Largest() const { return bytes_[largest_]; }
  bool Expert() const { return topology_.local_ranks == 1; }
  void Decide(std::string what, std::string value, std::string why) {
    sizing_.choices.push_back({std::move(what), std::move(value), std::move(why)});
  }

  void ChoosePlacing() {
    ReduceScatterOptions& options = sizing_.reduce_scatter;
    const internal::Chosen<Placement> placement = internal::ChoosePlacement(request_);
    options.placement = placement.value;
    Decide("placement", Name(placement.value), placement.why);
    const internal::Chosen<int> width = internal::ChooseWaveWidth(request_, placement.value);
    options.wave_width = width.value;
    if (topology_.nodes > 1) Decide("wave width", std::to_string(width.value), width.why);
  }

  // Candidates from the most to the least wanted: a chunk costs signals, a mode costs a copy and
  // the early all-gather, a pass costs every round again.
  std::vector<Candidate> Candidates() const {
    std::vector<Mode> modes = {Mode::kInPlace, Mode::kSlotReuse};
    const std::string obstacle = internal::SlotReuseObstacle(request_.groups);
    if (request_.mode == Mode::kSlotReuse && !obstacle.empty()) Refuse(obstacle);
    if (request_.mode) modes = {*request_.mode};
    if (!request_.mode && !obstacle.empty()) modes = {Mode::kInPlace};
    const int first = request_.passes.value_or(1);
    const bool passes_open = !request_.passes && topology_.nodes > 1;
    std::vector<Candidate> candidates;
    for (int passes = first; passes <= (passes_open ? kMaxPasses : first); ++passes) {
      for (const Mode mode : modes) {
        for (const int64_t chunk : Chunks(passes)) candidates.push_back({mode, passes, chunk});
      }
    }
    return candidates;
  }

  // From the largest to kMinChunkBytes, halving; only one if it was asked for.
  std::vector<int64_t> Chunks(int passes) const {
    const int64_t whole = WholeBlockBytes(passes);
    int64_t chunk = std::min(whole, request_.chunk_bytes.value_or(request_.machine.chunk_bytes));
    std::vector<int64_t> chunks = {chunk};
    while (!request_.chunk_bytes && topology_.local_ranks > 1 && chunk >= 2 * kMinChunkBytes) {
      chunk = AlignUp(chunk / 2, kStagingAlignment);
      chunks.push_back(chunk);
    }
    return chunks;
  }

  // What one peer stages for one destination block; at least a cache line of every row.
  int64_t WholeBlockBytes(int passes) const {
    const int rows = std::max({topology_.local_ranks, request_.machine.max_round_width,
                               request_.round_width.value_or(1)});
    int64_t bytes = rows * kStagingAlignment;
    for (const SizedGroup& group : request_.groups) {
      ReduceScatterOptions options = sizing_.reduce_scatter;
      options.passes = passes;
      const internal::ShardSpan span(group.layout, group.spec);
      const internal::ReductionShape shape(span, group.spec, topology_, options);
      const int64_t item = internal::BytesOf(group, true).grad_item;
      bytes = std::max(bytes, shape.rows() * shape.part() * item);
    }
    return AlignUp(bytes, kStagingAlignment);
  }

  void ChooseByMemory() {
    const std::vector<Candidate> candidates = Candidates();
    for (size_t i = 0; i < candidates.size(); ++i) {
      Apply(candidates[i]);
      if (!request_.memory_limit_bytes || sizing_.reserved.live() <= *request_.memory_limit_bytes) {
        Explain(candidates.front(), candidates[i]);
        return;
      }
    }
    RefuseForMemory(candidates.size());
  }

  void Apply(const Candidate& candidate) {
    ReduceScatterOptions& options = sizing_.reduce_scatter;
    options.mode = candidate.mode;
    options.passes = candidate.passes;
    options.staging = {candidate.chunk_bytes, request_.machine.staging_slots};
    round_ = internal::ChooseRoundWidth(request_.machine, topology_, options.wave_width,
                                        options.passes, wire_seconds_);
    if (request_.round_width) round_.why = "asked for";
    options.round_width = request_.round_width.value_or(round_.k);
    sizing_.passes.clear();
    sizing_.reserved = {};
    for (size_t g = 0; g < bytes_.size(); ++g) {
      sizing_.passes.push_back(PassesOf(g));
      AddReserved(request_.groups[g], sizing_.passes.back());
    }
    if (candidate.mode == Mode::kInPlace) {
      sizing_.reserved.gradients = topology_.Ranks() * Largest().grad;
    }
  }

  // A smaller group needs fewer passes for the same blocks.
  int PassesOf(size_t group) const {
    const int passes = sizing_.reduce_scatter.passes;
    if (request_.passes || bytes_[group].fp32 == 0) return passes;
    const int64_t block = CeilDiv(Largest().fp32, passes);
    return static_cast<int>(CeilDiv(bytes_[group].fp32, block));
  }

  void AddReserved(const SizedGroup& group, int passes) {
    ReduceScatterOptions options = sizing_.reduce_scatter;
    options.passes = passes;
    RegionBytes regions = ReduceScatterRegions(group.layout, group.spec, topology_, options);
    regions.stage = AllGatherRegions(group.layout, topology_, sizing_.all_gather).stage;
    sizing_.reserved.regions = Larger(sizing_.reserved.regions, regions);
    sizing_.reserved.landings =
        std::max(sizing_.reserved.landings, 2 * group.layout.landing_bytes());
  }

  void Explain(const Candidate& wanted, const Candidate& chosen) {
    const std::string limit =
        request_.memory_limit_bytes
            ? fmt::format("{} live of {} allowed", HumanBytes(sizing_.reserved.live()),
                          HumanBytes(*request_.memory_limit_bytes))
            : "no memory limit";
    std::string why = request_.mode ? "asked for" : limit;
    if (!request_.mode && chosen.mode == Mode::kInPlace) {
      why += "; gradients are read where autograd left them, and the next all-gather starts early";
    } else if (!request_.mode) {
      why += "; in_place also holds the previous layer's gradients and a full outbox";
    }
    Decide("mode", Name(chosen.mode), why);
    if (topology_.nodes > 1) ExplainNetwork(chosen, limit);
    if (!Expert()) ExplainChunk(wanted, chosen, limit);
  }

  void ExplainNetwork(const Candidate& chosen, const std::string& limit) {
    const ReduceScatterOptions& options = sizing_.reduce_scatter;
    Decide("round width k", std::to_string(options.round_width), round_.why);
    const auto rounds = internal::RoundsOf(topology_, options.wave_width, options.round_width);
    sizing_.outbox_depth = internal::OutboxDepth(topology_, rounds, chosen.passes, chosen.mode);
    sizing_.generations = internal::GenerationsOf(topology_, options.wave_width, chosen.passes);
    std::string why = request_.passes ? "asked for" : limit;
    if (!request_.passes && chosen.passes == 1) why += "; one pass has the fewest rounds";
    if (!request_.passes && chosen.passes > 1) why += "; fewer passes would not fit";
    Decide("passes", std::to_string(chosen.passes), why);
    Decide("outbox depth", std::to_string(sizing_.outbox_depth),
           chosen.mode == Mode::kInPlace
               ? fmt::format("n_part * (M-1): a block for every transfer, so no gradient waits for "
                             "the network")
               : fmt::format("max(k_i + k_i-1) over the rounds: sums of one round beside the "
                             "transfers of the one before"));
    Decide("inbox generations", std::to_string(sizing_.generations),
           sizing_.generations == 1 ? "a single wave in a single pass"
                                    : "one fills while the other is landed");
  }

  void ExplainChunk(const Candidate& wanted, const Candidate& chosen, const std::string& limit) {
    std::string why = fmt::format("{} slots a peer", request_.machine.staging_slots);
    const int64_t whole = WholeBlockBytes(chosen.passes);
    if (request_.chunk_bytes) {
      why += "; asked for";
    } else if (chosen.chunk_bytes >= whole) {
      why += "; a whole block, no larger is needed";
    } else if (chosen.passes == wanted.passes && chosen.chunk_bytes < wanted.chunk_bytes) {
      why += "; " + limit + ", a larger chunk would not fit";
    } else {
      why += fmt::format("; at most {} on machine '{}'", HumanBytes(request_.machine.chunk_bytes),
                         request_.machine.name);
    }
    Decide("chunk", HumanBytes(chosen.chunk_bytes), why);
  }

  // The last candidate, the smallest, is applied.
  [[noreturn]] void RefuseForMemory(size_t tried) const {
    const LaneMemory& memory = sizing_.reserved;
    const int64_t limit = *request_.memory_limit_bytes;
    const int64_t fixed = memory.landings + memory.regions.stage;
    const ReduceScatterOptions& options = sizing_.reduce_scatter;
    if (fixed > limit) {
      Refuse(
          fmt::format("memory limit {}: the all-gather alone takes {} ({} for two landings, {} "
                      "for the receive stage) of group '{}'; raise the limit or apply "
                      "fully_shard to smaller modules",
                      HumanBytes(limit), HumanBytes(fixed), HumanBytes(memory.landings),
                      HumanBytes(memory.regions.stage), LargestName()));
    }
    Refuse(fmt::format(
        "memory limit {}: the smallest of {} plans tried ({}, {} passes, chunks of {}) holds {} "
        "live: {} for landings and stage, {} for the reduce-scatter, {} of gradients; raise the "
        "limit to that, {}or apply fully_shard to smaller modules",
        HumanBytes(limit), tried, Name(options.mode), options.passes,
        HumanBytes(options.staging.slot_bytes), HumanBytes(memory.live()), HumanBytes(fixed),
        HumanBytes(memory.regions.reduce_scatter()), HumanBytes(memory.gradients),
        SlotReuseWouldHelp() ? "allow slot_reuse, " : ""));
  }

  bool SlotReuseWouldHelp() const {
    return sizing_.reduce_scatter.mode == Mode::kInPlace &&
           internal::SlotReuseObstacle(request_.groups).empty();
  }

  const std::string& LargestName() const { return request_.groups[largest_].layout.name(); }

  // As the adapter chooses, on a machine that `tide calibrate` has measured.
  internal::Chosen<int> SumBudget() const {
    const MachineModel& machine = request_.machine;
    const int64_t grad_item = Largest().grad_item;
    if (!machine.sum_added.empty()) return internal::ChooseSumCtas(machine, topology_, grad_item);
    return {internal::SumCtas(machine, topology_, grad_item),
            topology_.nodes == 1
                ? "equation 13, as if a rail were to be fed: one node has none to keep up with"
                : fmt::format("equation 13: keep up with {:g} GB/s of rail at {:g} GB/s a CTA, "
                              "times {:g} for skew",
                              machine.nic_gb_per_s, machine.sum_gb_per_s, machine.skew_factor)};
  }

  void ChooseBudgets() {
    const MachineModel& machine = request_.machine;
    const internal::Chosen<int> sums = SumBudget();
    sizing_.sum_ctas = sums.value;
    Decide("sum CTAs", std::to_string(sums.value), sums.why);
    if (topology_.nodes == 1 || Expert()) return;
    sizing_.landing_ctas = internal::LandingCtas(machine, wire_seconds_, Largest().fp32,
                                                 sizing_.reduce_scatter.passes);
    Decide("landing CTAs", std::to_string(sizing_.landing_ctas),
           fmt::format("equation 14: the last landing within {:g} % of {:.2f} ms on the wire, at "
                       "most {:g} / {:g} GB/s",
                       100 * machine.tail_fraction, 1e3 * wire_seconds_, machine.land_cap_gb_per_s,
                       machine.land_gb_per_s));
  }

  void FillFormula() {
    const ReduceScatterOptions& options = sizing_.reduce_scatter;
    const GroupBytes& bytes = Largest();
    const internal::MemoryShape shape = {.topology = topology_,
                                         .placement = options.placement,
                                         .mode = options.mode,
                                         .wave_width = options.wave_width,
                                         .round_width = options.round_width,
                                         .passes = options.passes,
                                         .staging_slots = options.staging.slots,
                                         .shard_bytes = bytes.shard,
                                         .fp32_bytes = bytes.fp32,
                                         .grad_bytes = bytes.grad,
                                         .cast = !resident_,
                                         .mixed_grads = bytes.mixed_grads,
                                         .narrow_output = bytes.narrow_output};
    sizing_.full_landing_bytes = topology_.Ranks() * bytes.shard;
    sizing_.formula.regions = internal::FormulaRegions(shape);
    sizing_.formula.landings = 2 * sizing_.full_landing_bytes;
    sizing_.formula.gradients = sizing_.reserved.gradients;
    // Unsharded parameters, a prefetched layer's, and the packed fp32 input of the layer before.
    sizing_.stock_live_bytes = 2 * sizing_.full_landing_bytes + topology_.Ranks() * bytes.fp32;
  }

  const SizingRequest& request_;
  const Topology topology_;
  std::vector<GroupBytes> bytes_;
  size_t largest_ = 0;
  bool resident_ = true;
  double wire_seconds_ = 0;
  internal::RoundWidth round_;
  Sizing sizing_;
};

}  // namespace

Sizing ChooseSizes(const SizingRequest& request) { return Solver(request).Solve(); }

}  // namespace tide
