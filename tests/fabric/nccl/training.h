// A training loop as the FSDP2 adapter enqueues it, on the fake: groups of different size, landings
// in two slots, all-gathers ahead of the computation that reads them, reduce-scatters behind the
// one that made the gradients. Hosts never wait.
#ifndef TIDE_TESTS_FABRIC_NCCL_TRAINING_H_
#define TIDE_TESTS_FABRIC_NCCL_TRAINING_H_

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fabric/nccl/fake.h"
#include "testing/checks.h"
#include "testing/landings.h"
#include "testing/random_case.h"
#include "tide/communicator.h"

namespace tide::testing {

inline constexpr int kTrainingGroups = 3;
inline constexpr int kTrainingSteps = 2;
inline constexpr size_t kSlots = 2;

using RankBuffers = std::vector<std::vector<char>>;  // one a parameter

// A group with the values of every step and what must come of them.
struct TrainedGroup {
  TrainedGroup(const std::string& name, const Topology& topology,
               const ReduceScatterOptions& options, unsigned seed)
      : made(MakeRandomCase(seed, 8)),
        layout(name, made.shapes, topology.Ranks()),
        shard_dtype(seed % 2 == 0 ? DType::kBF16 : DType::kF32) {
    std::vector<std::vector<float>> old(static_cast<size_t>(topology.Ranks()));
    for (int step = 0; step < kTrainingSteps; ++step) {
      const unsigned step_seed = seed + 10 * static_cast<unsigned>(step);
      const ReductionReference reference(layout, topology, options, made.grad_dtypes, step_seed);
      for (int rank = 0; rank < topology.Ranks(); ++rank) {
        auto& before = old[static_cast<size_t>(rank)];
        before = reference.Output(rank, made.scale, step > 0 ? &before : nullptr);
        outputs[step].push_back(before);
        shards[step].push_back(Shards(layout, shard_dtype, rank, step_seed));
        gradients[step].push_back(Gradients(layout, made.grad_dtypes, rank, step_seed));
        auto& theirs = landed[step].emplace_back(shards[step].back());
        if (shard_dtype == DType::kBF16) continue;
        for (auto& shard : theirs) shard = CastToBF16(shard, shard_dtype);
      }
    }
  }

  const RandomCase made;
  const GroupLayout layout;
  const DType shard_dtype;
  // By step and rank. Every step but the first adds to the outputs of the one before.
  std::vector<RankBuffers> shards[kTrainingSteps];
  std::vector<RankBuffers> landed[kTrainingSteps];
  std::vector<RankBuffers> gradients[kTrainingSteps];
  std::vector<std::vector<float>> outputs[kTrainingSteps];
};

struct TrainedModel {
  TrainedModel(const Topology& topology, unsigned seed)
      : choice(CoveringRow(static_cast<int>(seed) % kCoveringRows)),
        options(MakeOptions(topology, choice, seed)) {
    for (unsigned g = 0; g < kTrainingGroups; ++g) {
      groups.push_back(std::make_unique<TrainedGroup>("layers." + std::to_string(g), topology,
                                                      options.reduce_scatter, 100 * seed + g));
      landing_bytes = std::max(landing_bytes, groups.back()->layout.landing_bytes());
    }
  }

  const PlanChoice choice;
  const CommunicatorOptions options;
  std::vector<std::unique_ptr<TrainedGroup>> groups;
  int64_t landing_bytes = 0;  // of the largest
};

// One rank. Next() enqueues the next piece.
class TrainingRank {
 public:
  // Does not await events whose names contain `forgotten`: a mistake of the caller's.
  TrainingRank(const std::shared_ptr<FakeWorld>& world, Communicator& comm,
               const TrainedModel& model, std::string forgotten = "")
      : world_(*world),
        comm_(comm),
        model_(model),
        forgotten_(std::move(forgotten)),
        rank_(comm.rank()),
        device_(FakeParts(world, rank_)().device) {
    for (auto* stream : {&compute_, &sources_, &gather_, &reduce_})
      *stream = device_->CreateStream();
    SetUp();
    Plan();
  }
  ~TrainingRank() {
    for (const auto& [name, event] : events_) device_->DestroyEvent(event);
  }
  TrainingRank(const TrainingRank&) = delete;
  TrainingRank& operator=(const TrainingRank&) = delete;

  bool Next() {
    if (next_ == pieces_.size()) return false;
    pieces_[next_++]();
    return true;
  }

  std::vector<std::string> differences;

 private:
  struct Slot {
    SegmentView memory;
    std::string name;
  };
  struct State {  // of a group on this rank
    RankBuffers shards;
    RankBuffers gradients;
    std::vector<char> output;  // with canaries
  };

  const TrainedGroup& group(int g) const { return *model_.groups[static_cast<size_t>(g)]; }
  State& state(int g) { return states_[static_cast<size_t>(g)]; }

  void SetUp() {
    std::vector<GroupNeed> needs;
    states_.resize(model_.groups.size());
    for (int g = 0; g < kTrainingGroups; ++g) {
      const RandomCase& made = group(g).made;
      const int id = comm_.RegisterGroup(group(g).layout.name(), made.shapes);
      std::vector<int> params(made.shapes.size());
      std::iota(params.begin(), params.end(), 0);
      needs.push_back({id, params, made.grad_dtypes, DType::kF32});
      const auto rank = static_cast<size_t>(rank_);
      state(g).shards = group(g).shards[0][rank];
      state(g).gradients = group(g).gradients[0][rank];
      state(g).output.assign(group(g).outputs[0][rank].size() * 4 + 2 * kCanaryBytes, kCanary);
    }
    comm_.Reserve(needs);
    for (size_t i = 0; i < kSlots; ++i) {
      SegmentView memory = comm_.AddSegment(model_.landing_bytes + 2 * CanaryBytes(), "landing");
      std::memset(memory.address, kCanary, static_cast<size_t>(memory.bytes));
      slots_.push_back({std::move(memory), "slot " + std::to_string(i)});
    }
    comm_.Barrier();  // canaries are written everywhere
  }

  // Forward through the groups and back; each visit's all-gather is issued a visit ahead.
  void Plan() {
    size_t turn = 0;
    for (int step = 0; step < kTrainingSteps; ++step) {
      std::vector<int> visits(kTrainingGroups);
      std::iota(visits.begin(), visits.end(), 0);
      visits.insert(visits.end(), visits.rbegin(), visits.rend());
      pieces_.emplace_back([this, step] { Optimize(step); });
      const auto gather = [&](size_t visit) {
        if (visit >= visits.size()) return;
        pieces_.emplace_back([this, step, g = visits[visit], slot = (turn + visit) % kSlots] {
          Gather(step, g, slots_[slot]);
        });
      };
      gather(0);
      for (size_t visit = 0; visit < visits.size(); ++visit) {
        gather(visit + 1);
        pieces_.emplace_back(
            [this, step, g = visits[visit], slot = (turn + visit) % kSlots,
             backward = visit >= kTrainingGroups] { Compute(step, g, slots_[slot], backward); });
        if (visit < kTrainingGroups) continue;
        pieces_.emplace_back([this, step, g = visits[visit]] { Reduce(step, g); });
      }
      turn += visits.size();
    }
  }

  // New shards, when all gradients of the step before have been reduced.
  void Optimize(int step) {
    for (int g = 0; g < kTrainingGroups; ++g) Await(compute_, "reduced " + std::to_string(g));
    RunInStream(world_, compute_, [this, step] {
      for (int g = 0; g < kTrainingGroups; ++g) {
        Overwrite(&state(g).shards, group(g).shards[step][static_cast<size_t>(rank_)]);
      }
    });
    Record("updated", compute_);
    Await(sources_, "updated");
  }

  void Gather(int /*step*/, int g, const Slot& slot) {
    Await(sources_, slot.name + " vacated");
    AllGatherCall call;
    call.group = g;
    call.shards = Pointers(state(g).shards);
    call.shard_dtypes.assign(call.shards.size(), group(g).shard_dtype);
    call.landing = {slot.memory.id, CanaryBytes()};
    call.stream = gather_;
    call.ready_stream = sources_;
    comm_.AllGather(call);
    Record(slot.name + " gathered", gather_);
  }

  // Reads the landing, twice; the backward makes gradients.
  void Compute(int step, int g, const Slot& slot, bool backward) {
    const auto read = [this, step, g, &slot] { CheckLanding(step, g, slot); };
    Await(compute_, slot.name + " gathered");
    RunInStream(world_, compute_, read);
    if (backward) {
      RunInStream(world_, compute_, [this, step, g] {
        Overwrite(&state(g).gradients, group(g).gradients[step][static_cast<size_t>(rank_)]);
      });
      Record("gradients", compute_);
      Await(reduce_, "gradients");
    }
    RunInStream(world_, compute_, read);
    Record(slot.name + " vacated", compute_);
  }

  // Gradients are gone after it.
  void Reduce(int step, int g) {
    const RandomCase& made = group(g).made;
    ReduceScatterCall call;
    call.group = g;
    call.params.resize(made.shapes.size());
    std::iota(call.params.begin(), call.params.end(), 0);
    call.gradients = Pointers(state(g).gradients);
    call.grad_dtypes = made.grad_dtypes;
    call.output = state(g).output.data() + kCanaryBytes;
    call.scale = made.scale;
    call.accumulate = step > 0;
    call.stream = reduce_;
    comm_.ReduceScatter(call);
    RunInStream(world_, reduce_, [this, step, g] {
      CheckOutput(step, g);
      for (auto& gradient : state(g).gradients) std::fill(gradient.begin(), gradient.end(), '\x41');
    });
    Record("reduced " + std::to_string(g), reduce_);
  }

  static void Overwrite(RankBuffers* to, const RankBuffers& from) {
    for (size_t p = 0; p < from.size(); ++p) {
      std::copy(from[p].begin(), from[p].end(), (*to)[p].begin());
    }
  }
  void Record(const std::string& name, nccl::Stream stream) {
    auto& event = events_[name];
    if (event == nullptr) event = device_->CreateEvent();
    device_->Record(event, stream);
  }
  void Await(nccl::Stream stream, const std::string& name) {
    if (!forgotten_.empty() && name.find(forgotten_) != std::string::npos) return;
    const auto found = events_.find(name);
    if (found != events_.end()) device_->Await(stream, found->second);
  }

  static bool IsCanary(const char* from, int64_t bytes) {
    return std::all_of(from, from + bytes, [](char byte) { return byte == kCanary; });
  }
  void Differ(const std::string& what, int step, int g) {
    differences.push_back(what + " of group " + std::to_string(g) + ", step " +
                          std::to_string(step) + ", rank " + std::to_string(rank_));
  }
  void CheckLanding(int step, int g, const Slot& slot) {
    const auto* start = static_cast<const char*>(slot.memory.address);
    const char* landing = start + CanaryBytes();
    const GroupLayout& layout = group(g).layout;
    bool right =
        IsCanary(start, CanaryBytes()) && IsCanary(landing + model_.landing_bytes, CanaryBytes());
    for (int from = 0; from < layout.ranks(); ++from) {
      const RankBuffers& shards = group(g).landed[step][static_cast<size_t>(from)];
      for (size_t p = 0; p < shards.size(); ++p) {
        const char* at = landing + layout.LandingOffset(static_cast<int>(p), from);
        right = right && std::equal(shards[p].begin(), shards[p].end(), at);
      }
    }
    if (!right) Differ("landing in " + slot.name, step, g);
  }
  void CheckOutput(int step, int g) {
    const auto& expected = group(g).outputs[step][static_cast<size_t>(rank_)];
    const std::vector<char>& output = state(g).output;
    const auto bytes = static_cast<int64_t>(expected.size() * sizeof(float));
    const char* start = output.data() + kCanaryBytes;
    const bool same = bytes == 0 || std::memcmp(start, expected.data(), expected.size() * 4) == 0;
    if (same && IsCanary(output.data(), kCanaryBytes) && IsCanary(start + bytes, kCanaryBytes)) {
      return;
    }
    Differ("output", step, g);
  }

  FakeWorld& world_;
  Communicator& comm_;
  const TrainedModel& model_;
  const std::string forgotten_;
  const int rank_;
  const std::unique_ptr<nccl::Device> device_;
  nccl::Stream compute_ = nullptr;
  nccl::Stream sources_ = nullptr;  // where shards become ready, as FSDP2's copy-in stream
  nccl::Stream gather_ = nullptr;
  nccl::Stream reduce_ = nullptr;
  std::map<std::string, nccl::EventHandle> events_;
  std::vector<Slot> slots_;
  std::vector<State> states_;
  std::vector<std::function<void()>> pieces_;
  size_t next_ = 0;
};

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_TRAINING_H_
