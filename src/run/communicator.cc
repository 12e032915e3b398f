#include "tide/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "fabric/fabric.h"
#include "fabric/host/host_fabric.h"
#include "run/arena.h"
#include "run/call_key.h"
#include "run/program_cache.h"
#include "tide/error.h"
#include "tide/plan.h"

namespace tide {
namespace {

using Clock = std::chrono::steady_clock;
using internal::CallKey;

// First word of every key.
enum class Collective : int64_t { kBarrier, kAllGather, kReduceScatter };

struct Group {
  GroupLayout layout;
  int64_t hash = 0;  // of the name and all shapes
};

// A pass count is meant for the groups that span nodes: one node keeps nothing for others, and its
// planner refuses more than one.
ReduceScatterOptions ForTopology(ReduceScatterOptions options, const Topology& topology) {
  if (topology.nodes == 1) options.passes = 1;
  return options;
}

std::unique_ptr<Fabric> MakeFabric(Bootstrap& bootstrap, const CommunicatorOptions& options) {
  if (options.fabric == FabricKind::kHost) {
    return std::make_unique<host::HostFabric>(bootstrap, options);
  }
  // This library is free of CUDA, so that it is the same on every machine.
  throw Error(ErrorCode::kUnsupported,
              "a communicator on GPUs is made with the fabric of nccl::MakeNcclFabric "
              "(tide::fabric_nccl_cuda); this build, or this program, has none");
}

class TraceRecorder final : public TraceSink {
 public:
  void Add(const Call& call, const Operation& op, double start, double end) override {
    spans_.push_back({ToString(*call.program, op), call.program->name,
                      call.layout != nullptr ? call.layout->name() : std::string(),
                      static_cast<int64_t>(call.identity.sequence), start, end});
  }
  std::vector<TraceSpan> Take() { return std::exchange(spans_, {}); }

 private:
  std::vector<TraceSpan> spans_;
};

}  // namespace

class Communicator::Impl {
 public:
  Impl(std::unique_ptr<Fabric> fabric, const CommunicatorOptions& options)
      : options_(options),
        fabric_(std::move(fabric)),
        arena_(fabric_.get(), options.all_gather,
               ForTopology(options.reduce_scatter, fabric_->topology())) {
    if (options.all_gather.resident) {
      throw Error(ErrorCode::kInvalidArgument,
                  "all_gather.resident: expected false, shards lie where the caller has them");
    }
  }

  Fabric& fabric() { return *fabric_; }
  const Group& group(int id) const {
    if (id < 0 || id >= static_cast<int>(groups_.size())) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("expected a registered group in [0, {}), got {}", groups_.size(), id));
    }
    return *groups_[static_cast<size_t>(id)];
  }

  int RegisterGroup(const std::string& name, const std::vector<ParamShape>& shapes) {
    auto group =
        std::make_unique<Group>(Group{GroupLayout(name, shapes, fabric_->topology().Ranks())});
    group->hash = internal::HashGroup(group->layout, options_);
    groups_.push_back(std::move(group));
    return static_cast<int>(groups_.size()) - 1;
  }

  void Reserve(const std::vector<GroupNeed>& needs) {
    std::vector<internal::Arena::Need> sized;
    for (const GroupNeed& need : needs) {
      const GroupLayout& layout = group(need.group).layout;
      sized.push_back({&layout, {need.params, need.grad_dtypes, need.output_dtype}});
    }
    if (arena_.Reserve(sized)) ForgetPrograms();
  }

  void AllGather(const AllGatherCall& call, bool synchronised) {
    const Group& group = this->group(call.group);
    CheckCount("all_gather", group.layout, call.shards.size(), call.shard_dtypes.size());
    fabric_->CheckRange(call.landing, group.layout.landing_bytes());
    key_.Clear();
    key_.Add(static_cast<int64_t>(Collective::kAllGather));
    key_.Add(group.hash);
    key_.Add(call.shard_dtypes);
    key_.Add(static_cast<int64_t>(call.refresh));
    const Planned& planned = Lookup(synchronised, [&] {
      if (!arena_.HoldsAllGather(group.layout)) {
        RollCall("all_gather", call.group, nullptr);
        if (arena_.ReserveAllGather(group.layout)) ForgetPrograms();
      }
      AllGatherOptions options = arena_.all_gather();
      options.refresh = call.refresh;
      return PlanAllGather(group.layout, call.shard_dtypes, fabric_->topology(), fabric_->rank(),
                           options);
    });
    key_.Add(call.landing.segment);
    key_.Add(call.landing.offset);
    Bind(planned.program, [&](const Buffer& buffer) -> BufferAddress {
      if (buffer.kind == BufferKind::kLanding) return {nullptr, call.landing};
      if (buffer.kind != BufferKind::kShard) return arena_.Address(buffer);
      return {const_cast<void*>(call.shards[static_cast<size_t>(buffer.index)]), {}};
    });
    binding_.scale = 1.0F;
    Execute(planned, StreamsOf(call.ready_stream, call.stream), call.group, nullptr, synchronised);
  }

  void ReduceScatter(const ReduceScatterCall& call, bool synchronised) {
    const Group& group = this->group(call.group);
    if (call.params.size() != call.gradients.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("reduce_scatter of group '{}': {} parameters but {} gradients",
                              group.layout.name(), call.params.size(), call.gradients.size()));
    }
    // Banks alternate, so that a call's reads overlap the sends of the call before.
    const bool alternates = fabric_->topology().nodes > 1 && synchronised;
    const int bank = alternates ? static_cast<int>(reduce_scatters_ % 2) : 0;
    key_.Clear();
    key_.Add(static_cast<int64_t>(Collective::kReduceScatter));
    key_.Add(group.hash);
    key_.Add(call.params);
    key_.Add(call.grad_dtypes);
    key_.Add(static_cast<int64_t>(call.output_dtype));
    key_.Add(static_cast<int64_t>(call.accumulate));
    key_.Add(bank);
    const Planned& planned = Lookup(synchronised, [&] {
      const ReduceScatterSpec spec{call.params, call.grad_dtypes, call.output_dtype,
                                   call.accumulate, bank};
      if (!arena_.HoldsReduceScatter(group.layout, spec)) {
        RollCall("reduce_scatter", call.group, &call.params);
        if (arena_.Reserve({{&group.layout, spec}})) ForgetPrograms();
      }
      return PlanReduceScatter(group.layout, spec, fabric_->topology(), fabric_->rank(),
                               arena_.reduce_scatter());
    });
    int32_t scale_bits = 0;
    std::memcpy(&scale_bits, &call.scale, sizeof scale_bits);
    key_.Add(scale_bits);
    Bind(planned.program, [&](const Buffer& buffer) -> BufferAddress {
      switch (buffer.kind) {
        case BufferKind::kGradient:
          return {const_cast<void*>(call.gradients[static_cast<size_t>(buffer.index)]), {}};
        case BufferKind::kOutput:
          return {call.output, {}};
        default:
          return arena_.Address(buffer);
      }
    });
    binding_.scale = call.scale;
    if (alternates) ++reduce_scatters_;  // not before: a refused call changes nothing
    Execute(planned, StreamsOf({}, call.stream), call.group, &call.params, synchronised);
  }

  void Barrier() {
    key_.Clear();
    key_.Add(static_cast<int64_t>(Collective::kBarrier));
    const Planned& planned =
        Lookup(true, [&] { return PlanBarrier(fabric_->topology(), fabric_->rank()); });
    Bind(planned.program, [](const Buffer&) { return BufferAddress(); });
    Execute(planned, {}, -1, nullptr, true);
  }

  bool poisoned() const { return poisoned_; }
  const RegionBytes& regions() const { return arena_.regions(); }

  CallTimes times;
  bool tracing = false;
  TraceRecorder trace;

 private:
  using Planned = internal::PlannedProgram;

  void ForgetPrograms() {  // they name offsets of the old regions
    programs_.Clear();
    floors_.Clear();
  }

  // Compares the call on all ranks before something collective that is no program happens.
  void RollCall(const char* collective, int group_id, const std::vector<int>* params) {
    Planned barrier{PlanBarrier(fabric_->topology(), fabric_->rank()), nullptr};
    barrier.program.name = collective;
    barrier.prepared = Prepare(barrier.program);
    binding_.buffers.clear();
    Execute(barrier, {}, group_id, params, true);
  }

  // A rank that can't prepare a call misses it, and its next call would meet the peers' this one.
  std::shared_ptr<Prepared> Prepare(const Program& program) {
    try {
      return fabric_->Prepare(program);
    } catch (const std::exception& error) {
      Poison(error);
      throw;
    }
  }

  void Poison(const std::exception& error) {
    poisoned_ = true;
    poison_ = error.what();
  }

  static void CheckCount(const char* what, const GroupLayout& layout, size_t shards,
                         size_t dtypes) {
    if (shards == layout.params().size() && dtypes == shards) return;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} of group '{}': expected {} shards and dtypes, got {} and {}", what,
                            layout.name(), layout.params().size(), shards, dtypes));
  }

  // `plan` makes room in the regions, if there is none, and plans: only where no program is cached,
  // so that a steady call does not even ask.
  //
  // Whatever each rank has cached, all of them still meet in the same roll calls. A program is
  // cached only when the regions hold its call, and they only grow; whether they do depends on the
  // call and on their sizes alone, which are equal on all ranks. So "there is no room" implies "no
  // program is cached": a rank that does not ask is one whose answer would have been yes.
  template <typename Plan>
  const Planned& Lookup(bool synchronised, const Plan& plan) {
    auto& programs = synchronised ? programs_ : floors_;
    if (const Planned* found = programs.Find(key_.words())) return *found;
    Planned planned;
    planned.program = synchronised ? plan() : WithoutSynchronisation(plan());
    if (options_.faults.transform) {
      planned.program = options_.faults.transform(std::move(planned.program));
    }
    planned.prepared = Prepare(planned.program);
    return programs.Add(key_.words(), std::move(planned));
  }

  template <typename Resolve>
  void Bind(const Program& program, const Resolve& resolve) {
    binding_.buffers.clear();
    for (const Buffer& buffer : program.buffers) {
      binding_.buffers.push_back(resolve(buffer));
      const BufferAddress& address = binding_.buffers.back();
      if (buffer.bytes > 0 && address.local == nullptr && address.symmetric.segment < 0) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{}: {} of {} bytes has no address", program.name, ToString(buffer),
                                buffer.bytes));
      }
    }
  }

  static std::optional<CallStreams> StreamsOf(std::optional<void*> ready,
                                              std::optional<void*> done) {
    if (done) return CallStreams{ready.value_or(*done), *done};
    if (!ready) return std::nullopt;
    throw Error(ErrorCode::kInvalidArgument, "a call with a ready_stream needs a stream, too");
  }

  void Execute(const Planned& planned, std::optional<CallStreams> streams, int group_id,
               const std::vector<int>* params, bool synchronised) {
    const Program& program = planned.program;
    if (poisoned_) {
      throw Error(
          ErrorCode::kPoisoned,
          fmt::format("{}: an earlier call failed ({}); this communicator can't be used any more",
                      program.name, poison_));
    }
    Call call;
    call.program = &program;
    call.prepared = planned.prepared;
    call.streams = streams;
    call.binding = &binding_;
    call.layout = group_id >= 0 ? &group(group_id).layout : nullptr;
    if (synchronised) FillIdentity(group_id, params, &call);
    const auto start = Clock::now();
    try {
      times.wait = fabric_->Execute(call, tracing ? &trace : nullptr);
    } catch (const std::exception& error) {
      Poison(error);
      throw;
    }
    times.total = std::chrono::duration<double>(Clock::now() - start).count();
  }

  void FillIdentity(int group_id, const std::vector<int>* params, Call* call) {
    CallIdentity& identity = call->identity;
    identity.sequence = ++sequence_;
    identity.key = key_.Hash();
    identity.group = group_id;
    if (call->layout == nullptr) {
      std::strncpy(identity.text, call->program->name.c_str(), kCallTextBytes - 1);
      return;
    }
    identity.params = static_cast<int32_t>(call->layout->params().size());
    if (params != nullptr) {
      for (const int param : *params) {
        if (param < kNamedParams) identity.takes_part[param / 64] |= uint64_t{1} << (param % 64);
      }
    }
    const auto end = fmt::format_to_n(identity.text, kCallTextBytes - 1, "{} of group '{}'",
                                      call->program->name, call->layout->name());
    *end.out = '\0';
  }

  const CommunicatorOptions options_;
  std::vector<std::unique_ptr<Group>> groups_;  // outlive the fabric, which names their parameters
  std::unique_ptr<Fabric> fabric_;
  internal::Arena arena_;
  uint64_t reduce_scatters_ = 0;
  // One sequence over all collectives; 0 is no call.
  uint64_t sequence_ = 0;
  internal::ProgramCache programs_;
  internal::ProgramCache floors_;
  CallKey key_;      // kept to reuse the memory
  Binding binding_;  // likewise
  bool poisoned_ = false;
  std::string poison_;
};

Communicator::Communicator(Bootstrap& bootstrap, const CommunicatorOptions& options)
    : Communicator(MakeFabric(bootstrap, options), options) {}
Communicator::Communicator(std::unique_ptr<Fabric> fabric, const CommunicatorOptions& options)
    : impl_(std::make_unique<Impl>(std::move(fabric), options)) {}
Communicator::~Communicator() = default;

int Communicator::rank() const { return impl_->fabric().rank(); }
const Topology& Communicator::topology() const { return impl_->fabric().topology(); }
int Communicator::RegisterGroup(const std::string& name, const std::vector<ParamShape>& shapes) {
  return impl_->RegisterGroup(name, shapes);
}
const GroupLayout& Communicator::layout(int group) const { return impl_->group(group).layout; }
SegmentView Communicator::AddSegment(int64_t bytes, const std::string& label, SegmentKind kind) {
  return impl_->fabric().AddSegment(bytes, label, kind);
}
const RegionBytes& Communicator::regions() const { return impl_->regions(); }
const std::string& Communicator::unshared_reason() const {
  return impl_->fabric().unshared_reason();
}
const std::string& Communicator::unwatched_reason() const {
  return impl_->fabric().unwatched_reason();
}
int Communicator::aliased_streams() const { return impl_->fabric().aliased_streams(); }
std::string Communicator::unicast_reason() const { return impl_->fabric().unicast_reason(); }
void Communicator::Reserve(const std::vector<GroupNeed>& needs) { impl_->Reserve(needs); }
void Communicator::AllGather(const AllGatherCall& call) { impl_->AllGather(call, true); }
void Communicator::ReduceScatter(const ReduceScatterCall& call) {
  impl_->ReduceScatter(call, true);
}
void Communicator::Barrier() { impl_->Barrier(); }
void Communicator::UnsynchronisedAllGather(const AllGatherCall& call) {
  impl_->AllGather(call, false);
}
void Communicator::UnsynchronisedReduceScatter(const ReduceScatterCall& call) {
  impl_->ReduceScatter(call, false);
}
bool Communicator::poisoned() const { return impl_->poisoned(); }
CallTimes Communicator::last_call() const { return impl_->times; }
void Communicator::EnableTrace(bool enable) { impl_->tracing = enable; }
std::vector<TraceSpan> Communicator::TakeTrace() { return impl_->trace.Take(); }

}  // namespace tide
