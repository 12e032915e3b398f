#include "verify/sequence.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "verify/contents.h"

namespace tide::verify {
namespace {

constexpr int kBanks = 2;

// Regions of a lane, which all its calls share; the others belong to one call.
bool LaneOwned(BufferKind kind) {
  switch (kind) {
    case BufferKind::kStage:
    case BufferKind::kStaging:
    case BufferKind::kOutbox:
    case BufferKind::kSpare:
    case BufferKind::kInbox:
    case BufferKind::kAccumulator:
      return true;
    default:
      return false;
  }
}

CallerStep Await(int call, EventKind event, CallerQueue queue = CallerQueue::kMain) {
  CallerStep step;
  step.kind = CallerStep::Kind::kAwait;
  step.queue = queue;
  step.call = call;
  step.event = {event};
  return step;
}

CallerStep Access(CallerStep::Kind kind, int call, std::string what,
                  std::function<std::vector<Content>(int)> contents,
                  CallerQueue queue = CallerQueue::kMain) {
  CallerStep step;
  step.kind = kind;
  step.queue = queue;
  step.call = call;
  step.what = std::move(what);
  step.contents = std::move(contents);
  return step;
}

}  // namespace

const ProgramCache::Programs& ProgramCache::AllGather(int group) {
  return AllGather(group, setup_.all_gather, &all_gather_[group]);
}

const ProgramCache::Programs& ProgramCache::Refresh(int group) {
  AllGatherOptions options = setup_.all_gather;
  options.refresh = true;
  return AllGather(group, options, &refresh_[group]);
}

const ProgramCache::Programs& ProgramCache::AllGather(int group, const AllGatherOptions& options,
                                                      Programs* programs) {
  const VerifyGroup& spec = setup_.groups[static_cast<size_t>(group)];
  for (int rank = static_cast<int>(programs->size()); rank < setup_.topology.Ranks(); ++rank) {
    check_interrupt_();
    programs->push_back(std::make_shared<const Program>(
        PlanAllGather(spec.layout, spec.shard_dtypes, setup_.topology, rank, options)));
  }
  return *programs;
}

const ProgramCache::Programs& ProgramCache::ReduceScatter(int group, int bank) {
  Programs& programs = reduce_scatter_[{group, bank}];
  const VerifyGroup& spec = setup_.groups[static_cast<size_t>(group)];
  ReduceScatterSpec reduce = spec.reduce;
  reduce.bank = bank;
  for (int rank = static_cast<int>(programs.size()); rank < setup_.topology.Ranks(); ++rank) {
    check_interrupt_();
    programs.push_back(std::make_shared<const Program>(
        PlanReduceScatter(spec.layout, reduce, setup_.topology, rank, setup_.reduce_scatter)));
  }
  return programs;
}

Sequence::Sequence(std::string name, ProgramCache* cache, LandingModel model, int first_bank)
    : cache_(*cache), setup_(cache->setup()), model_(model), bank_(first_bank) {
  input_.name = std::move(name);
  input_.topology = setup_.topology;
}

Call& Sequence::NewCall(const ProgramCache::Programs& programs, Role role) {
  Call& call = input_.calls.emplace_back();
  call.programs = programs;
  call.predecessor = role == Role::kPredecessor;
  return call;
}

int Sequence::AddObject(std::string name, bool lane_owned, bool per_node) {
  input_.objects.push_back({std::move(name), lane_owned, per_node});
  return static_cast<int>(input_.objects.size()) - 1;
}

Sequence::Landing& Sequence::LandingOf(int index) {
  Landing& landing = landings_[index];
  if (landing.object < 0) {
    landing.object = AddObject(fmt::format("landing {}", index), /*lane_owned=*/false,
                               model_ == LandingModel::kNode);
  }
  return landing;
}

void Sequence::PlaceBuffers(Call* call) {
  for (const auto& program : call->programs) {
    for (const Buffer& buffer : program->buffers) {
      const std::pair<BufferKind, int> key{buffer.kind, buffer.index};
      if (call->places.count(key) != 0) continue;
      if (!LaneOwned(buffer.kind)) {
        const int object = AddObject(fmt::format("{} (call {})", ToString(buffer), last_call()));
        call->places[key] = {object, 0};
        continue;
      }
      const auto [found, added] = regions_.try_emplace(key, -1);
      if (added) found->second = AddObject(ToString(buffer), /*lane_owned=*/true);
      call->places[key] = {found->second, 0};
    }
  }
}

void Sequence::Release(Landing* landing, Call* call) {
  call->before.insert(call->before.end(), landing->release.begin(), landing->release.end());
  landing->release.clear();
}

void Sequence::Ready(Call* call) const {
  CallerStep step;
  step.kind = CallerStep::Kind::kRecord;
  step.call = last_call();
  step.event = {EventKind::kReady};
  call->before.push_back(std::move(step));
}

void Sequence::AllGather(int group, int landing, Role role) {
  Gather(cache_.AllGather(group), group, landing, role);
}

void Sequence::Refresh(int group, int landing) {
  Gather(cache_.Refresh(group), group, landing, Role::kChecked);
}

void Sequence::Gather(const ProgramCache::Programs& programs, int group, int landing_index,
                      Role role) {
  Call& call = NewCall(programs, role);
  const int index = last_call();
  if (role == Role::kPredecessor) {
    PlaceBuffers(&call);
    Ready(&call);
    return;
  }
  Landing& landing = LandingOf(landing_index);
  const Place place{landing.object, 0};
  call.places[{BufferKind::kLanding, 0}] = place;
  PlaceBuffers(&call);
  Release(&landing, &call);

  const VerifyGroup* spec = &setup_.groups[static_cast<size_t>(group)];
  const auto shards = [spec, programs = call.programs, places = call.places, index](int rank) {
    return ShardContents(*spec, *programs[static_cast<size_t>(rank)], places, index);
  };
  call.before.push_back(Access(CallerStep::Kind::kWrite, index, "writes its shards", shards));
  Ready(&call);
  frees_.push_back(Await(index, EventKind::kReadDone, CallerQueue::kFreeAllGather));
  frees_.push_back(Access(
      CallerStep::Kind::kWrite, index, "changes its shards after read_done",
      [shards](int rank) { return Freed(shards(rank)); }, CallerQueue::kFreeAllGather));
  landing.release = {
      Await(index, EventKind::kDone),
      Access(CallerStep::Kind::kRead, index, "reads the landing", [spec, place, index](int) {
        return LandingContents(spec->layout, spec->shard_dtypes, place, index);
      })};
}

void Sequence::ReduceScatter(int group, int landing_index, Role role) {
  const VerifyGroup* spec = &setup_.groups[static_cast<size_t>(group)];
  Call& call = NewCall(cache_.ReduceScatter(group, bank_), role);
  bank_ = (bank_ + 1) % kBanks;
  const int index = last_call();
  const bool in_landing = landing_index >= 0 && model_ == LandingModel::kRank;
  if (in_landing) {
    Landing& landing = LandingOf(landing_index);
    Release(&landing, &call);
    for (size_t i = 0; i < spec->reduce.params.size(); ++i) {
      call.places[{BufferKind::kGradient, static_cast<int>(i)}] = {
          landing.object, spec->layout.LandingOffset(spec->reduce.params[i], 0)};
    }
    landing.release = {Await(index, EventKind::kReadDone)};
  }
  PlaceBuffers(&call);
  if (role == Role::kPredecessor) {
    Ready(&call);
    return;
  }

  const auto gradients = [spec, places = call.places, index](int rank) {
    return GradientContents(*spec, places, rank, index);
  };
  const Place output = call.places.at({BufferKind::kOutput, 0});
  call.before.push_back(
      Access(CallerStep::Kind::kWrite, index,
             in_landing ? "copies gradients into the landing" : "writes gradients", gradients));
  if (spec->reduce.accumulate) {
    call.before.push_back(Access(
        CallerStep::Kind::kWrite, index, "writes the output to add to",
        [spec, output, index](int rank) { return OldOutputContents(*spec, output, rank, index); }));
  }
  Ready(&call);
  if (!in_landing) {
    frees_.push_back(Await(index, EventKind::kReadDone, CallerQueue::kFreeReduceScatter));
    frees_.push_back(Access(
        CallerStep::Kind::kWrite, index, "frees gradients after read_done",
        [gradients](int rank) { return Freed(gradients(rank)); }, CallerQueue::kFreeReduceScatter));
  }
  auto reduction = std::make_shared<Reduction>();
  reduction->topology = setup_.topology;
  reduction->waves = ContributorWaves(setup_.topology, setup_.reduce_scatter.wave_width);
  reduction->accumulate = spec->reduce.accumulate;
  results_.push_back(Await(index, EventKind::kDone));
  results_.push_back(Access(
      CallerStep::Kind::kRead, index, "reads the output",
      [spec, output, index, reduction = std::shared_ptr<const Reduction>(reduction)](int rank) {
        return ReducedContents(*spec, output, rank, index, reduction);
      }));
}

Input Sequence::Finish() {
  for (auto& [index, landing] : landings_) {
    results_.insert(results_.end(), landing.release.begin(), landing.release.end());
  }
  input_.after = std::move(frees_);
  input_.after.insert(input_.after.end(), results_.begin(), results_.end());
  return std::move(input_);
}

std::vector<Input> AllGatherSequences(ProgramCache* cache, LandingModel model) {
  constexpr int kLandings = 2;
  const int groups = static_cast<int>(cache->setup().groups.size());
  const int calls = std::max(2 * groups, kLandings + 1);
  std::vector<Input> inputs;
  Sequence alternating("all_gather, two landings", cache, model);
  Sequence apart("all_gather, a landing each", cache, model);
  for (int call = 0; call < calls; ++call) {
    alternating.AllGather(call % groups, call % kLandings);
    apart.AllGather(call % groups, call);
  }
  inputs.push_back(alternating.Finish());
  inputs.push_back(apart.Finish());
  for (int before = 0; before < groups; ++before) {
    for (int after = 0; after < groups; ++after) {
      Sequence pair(
          fmt::format("all_gather of group {} after a worst case of group {}", after, before),
          cache, model);
      pair.AllGather(before, 0, Role::kPredecessor);
      pair.AllGather(after, 0);
      inputs.push_back(pair.Finish());
    }
  }
  return inputs;
}

std::vector<Input> RefreshSequences(ProgramCache* cache, LandingModel model) {
  const int groups = static_cast<int>(cache->setup().groups.size());
  std::vector<Input> inputs;
  for (int after = 0; after < groups; ++after) {
    Sequence again(fmt::format("refreshes of group {} in one landing", after), cache, model);
    again.AllGather(after, 0);
    for (int i = 0; i < 3; ++i) again.Refresh(after, 0);
    inputs.push_back(again.Finish());
    for (int between = 0; between < groups; ++between) {
      Sequence apart(fmt::format("refresh of group {} after an all-gather of group {} elsewhere",
                                 after, between),
                     cache, model);
      apart.AllGather(after, 0);
      apart.AllGather(between, 1);
      apart.Refresh(between, 1);
      apart.Refresh(after, 0);
      inputs.push_back(apart.Finish());
    }
  }
  return inputs;
}

std::vector<Input> ReduceScatterSequences(ProgramCache* cache, LandingModel model) {
  const int groups = static_cast<int>(cache->setup().groups.size());
  const int calls = std::max(2 * groups, 3);
  std::vector<Input> inputs;
  Sequence turns("reduce_scatter", cache, model);
  for (int call = 0; call < calls; ++call) turns.ReduceScatter(call % groups);
  inputs.push_back(turns.Finish());
  for (int before = 0; before < groups; ++before) {
    for (int after = 0; after < groups; ++after) {
      // Both banks have been used: the checked call's own and the other one.
      for (int bank = 0; bank < kBanks; ++bank) {
        Sequence chain(fmt::format("reduce_scatter of group {} on bank {} after worst cases of "
                                   "group {}",
                                   after, bank, before),
                       cache, model, bank);
        for (int b = 0; b < kBanks; ++b) chain.ReduceScatter(before, -1, Role::kPredecessor);
        chain.ReduceScatter(after);
        inputs.push_back(chain.Finish());
      }
    }
  }
  return inputs;
}

std::vector<Input> TrainingSequences(ProgramCache* cache, LandingModel model) {
  constexpr int kLandings = 2;
  constexpr int kLayers = 3;
  const VerifySetup& setup = cache->setup();
  const int groups = static_cast<int>(setup.groups.size());
  const bool reuse = setup.reduce_scatter.mode == Mode::kSlotReuse;
  Sequence backward("backward pass", cache, model);
  for (int layer = 0; layer <= kLayers; ++layer) {
    if (layer < kLayers) backward.AllGather(layer % groups, layer % kLandings);
    if (layer == 0) continue;
    const int reduced = layer - 1;
    backward.ReduceScatter(reduced % groups, reuse ? reduced % kLandings : -1);
  }
  std::vector<Input> inputs;
  inputs.push_back(backward.Finish());
  if (setup.topology.nodes > 1) return inputs;
  // The forward leaves the last two layers in the landings.
  Sequence refreshed("forward, and a backward pass with refreshes", cache, model);
  for (int layer = 0; layer < kLayers; ++layer) {
    refreshed.AllGather(layer % groups, layer % kLandings);
  }
  refreshed.Refresh((kLayers - 1) % groups, (kLayers - 1) % kLandings);
  for (int layer = kLayers - 1; layer >= 0; --layer) {
    const int next = layer - 1;
    const bool lies_there = layer == kLayers - 1;
    if (lies_there) refreshed.Refresh(next % groups, next % kLandings);
    if (!lies_there && next >= 0) refreshed.AllGather(next % groups, next % kLandings);
    refreshed.ReduceScatter(layer % groups, reuse ? layer % kLandings : -1);
  }
  inputs.push_back(refreshed.Finish());
  return inputs;
}

}  // namespace tide::verify

namespace tide {
namespace {

VerifyResult VerifyAll(const std::vector<verify::Input>& inputs, const VerifyOptions& options) {
  VerifyResult result;
  for (const verify::Input& input : inputs) {
    result.Add(verify::Verify(input, options));
    if (static_cast<int>(result.findings.size()) >= options.max_findings) break;
  }
  return result;
}

}  // namespace

VerifyResult VerifyAllGather(const VerifySetup& setup, const VerifyOptions& options) {
  verify::ProgramCache cache(setup, options.check_interrupt);
  auto inputs = verify::AllGatherSequences(&cache, options.landing);
  if (setup.topology.nodes == 1) {
    auto refreshes = verify::RefreshSequences(&cache, options.landing);
    std::move(refreshes.begin(), refreshes.end(), std::back_inserter(inputs));
  }
  return VerifyAll(inputs, options);
}

VerifyResult VerifyReduceScatter(const VerifySetup& setup, const VerifyOptions& options) {
  verify::ProgramCache cache(setup, options.check_interrupt);
  return VerifyAll(verify::ReduceScatterSequences(&cache, options.landing), options);
}

VerifyResult VerifyTraining(const VerifySetup& setup, const VerifyOptions& options) {
  verify::ProgramCache cache(setup, options.check_interrupt);
  return VerifyAll(verify::TrainingSequences(&cache, options.landing), options);
}

}  // namespace tide
