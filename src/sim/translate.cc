#include "sim/translate.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tide/error.h"

namespace tide::sim {
namespace {

using nccl::Command;
using nccl::CommandKind;

constexpr int kCommandsBetweenChecks = 1 << 12;

std::string OthersToo(int count) {
  return count > 1 ? fmt::format(" and {} more", count - 1) : std::string();
}

// The access to `rank`, which is added if need be.
Rates::Access& AccessTo(int rank, std::vector<Rates::Access>* accesses) {
  for (Rates::Access& access : *accesses) {
    if (access.rank == rank) return access;
  }
  return accesses->emplace_back(Rates::Access{rank, 0});
}

const char* NameOf(nccl::SumKind kind) {
  switch (kind) {
    case nccl::SumKind::kCast:
      return "cast";
    case nccl::SumKind::kRefresh:
      return "refresh";
    case nccl::SumKind::kSum:
    case nccl::SumKind::kMulticast:
      break;
  }
  return "sum";
}

}  // namespace

Translator::Translator(const Topology& topology, const Rates& rates,
                       std::function<void()> check_interrupt)
    : topology_(topology), rates_(rates), check_interrupt_(std::move(check_interrupt)) {}

Translator::CounterKey Translator::KeyOf(int holder, Lane lane, const Counter& counter) {
  return {holder, static_cast<int>(lane), static_cast<int>(counter.kind), counter.producer,
          counter.index};
}

int Translator::AddStream(int rank, std::string name) {
  streams_.push_back({rank, std::move(name)});
  states_.emplace_back();
  return static_cast<int>(states_.size()) - 1;
}

// Queues of one name and lane are one stream from call to call.
int Translator::StreamOf(int rank, Lane lane, const std::string& name) {
  const auto [found, added] =
      stream_index_.emplace(std::tuple(rank, static_cast<int>(lane), name), 0);
  if (added) found->second = AddStream(rank, fmt::format("{}: {}", Name(lane), name));
  return found->second;
}

int Translator::AddTask(int stream, Overhead overhead, double delay, Flow flow, std::string what) {
  const auto task = static_cast<int>(tasks_.size());
  StreamState& state = states_[static_cast<size_t>(stream)];
  if (state.last != kNoTask) state.pending.push_back({state.last, 0});
  tasks_.push_back({std::move(state.pending), delay, std::move(flow)});
  infos_.push_back({stream, overhead, std::move(what)});
  state.pending.clear();
  state.last = task;
  return task;
}

int Translator::AddDelay(int stream, double seconds, std::string what) {
  return AddTask(stream, Overhead::kNone, seconds, {}, std::move(what));
}

int Translator::AddCompute(int stream, double seconds, double gb_per_s, std::string what) {
  const int rank = streams_[static_cast<size_t>(stream)].rank;
  Flow flow = rates_.Compute(rank, seconds, gb_per_s);
  const double delay = flow.bytes > 0 ? 0 : seconds;
  return AddTask(stream, Overhead::kCompute, delay, std::move(flow), std::move(what));
}

void Translator::Follow(int stream, int task, double lag) {
  if (task != kNoTask) states_[static_cast<size_t>(stream)].pending.push_back({task, lag});
}

int Translator::Tail(int stream) {
  StreamState& state = states_[static_cast<size_t>(stream)];
  if (!state.pending.empty()) AddTask(stream, Overhead::kNone, 0, {}, "event");
  return state.last;
}

std::vector<int> Translator::AddCall(const std::vector<Program>& programs,
                                     const std::vector<int>& ready) {
  std::vector<int> ends;
  ends.reserve(programs.size());
  for (const Program& program : programs) {
    check_interrupt_();
    const nccl::Lowered lowered = nccl::Lower(program);
    Context context{&program, &lowered, {}, std::vector<int>(static_cast<size_t>(lowered.events))};
    std::fill(context.events.begin(), context.events.end(), kNoTask);
    for (const std::string& name : lowered.streams) {
      context.streams.push_back(StreamOf(program.rank, program.lane, name));
    }
    context.events[nccl::kReadyEvent] = ready[static_cast<size_t>(program.rank)];
    context.events[nccl::kGateEvent] = ready[static_cast<size_t>(program.rank)];
    for (const Command& command : lowered.commands) AddCommand(&context, command);
    ends.push_back(context.events[nccl::kDoneEvent]);
  }
  ResolveWaits();
  for (const Program& program : programs) {
    for (const Increment& increment : program.increments) {
      counters_[KeyOf(program.rank, program.lane, increment.counter)].base += increment.value;
    }
  }
  return ends;
}

void Translator::AddCommand(Context* context, const Command& command) {
  if (++commands_ % kCommandsBetweenChecks == 0) check_interrupt_();
  const int stream = context->streams[static_cast<size_t>(command.stream)];
  const auto first = static_cast<size_t>(command.first);
  switch (command.kind) {
    case CommandKind::kCopies:
      return AddCopies(*context, command, stream);
    case CommandKind::kPitched:
      return AddPitched(*context, command, stream);
    case CommandKind::kMemoryOps:
      return AddMemoryOps(*context, command, stream);
    case CommandKind::kSends:
      return AddSends(*context, command, stream);
    case CommandKind::kRailWaits:
      return AddRailWaits(*context, command, stream);
    case CommandKind::kRecord:
      context->events[first] = Tail(stream);
      return;
    case CommandKind::kAwait:
      return Follow(stream, context->events[first], rates_.event());
    case CommandKind::kSum:
      return AddSum(*context, command, stream);
    case CommandKind::kZero:
      return AddZero(*context, command, stream);
  }
}

void Translator::AddCopies(const Context& context, const Command& command, int stream) {
  std::vector<Rates::Access> copies;
  for (int i = command.first; i < command.first + command.count; ++i) {
    const nccl::LoweredCopy& copy = context.lowered->copies[static_cast<size_t>(i)];
    copies.push_back({context.lowered->bases[static_cast<size_t>(copy.dst.base)].rank,
                      static_cast<double>(copy.bytes)});
  }
  AddBatch(stream, context.program->rank, copies, /*pitched=*/false);
}

void Translator::AddPitched(const Context& context, const Command& command, int stream) {
  std::vector<Rates::Access> copies;
  for (int i = command.first; i < command.first + command.count; ++i) {
    const nccl::LoweredPitched& copy = context.lowered->pitched[static_cast<size_t>(i)];
    copies.push_back({context.lowered->bases[static_cast<size_t>(copy.dst.base)].rank,
                      static_cast<double>(copy.row_bytes) * static_cast<double>(copy.rows)});
  }
  AddBatch(stream, context.program->rank, copies, /*pitched=*/true);
}

// A batch goes from rank to rank, each in turn.
void Translator::AddBatch(int stream, int own, const std::vector<Rates::Access>& copies,
                          bool pitched) {
  double delay = rates_.batch();
  for (size_t i = 0; i < copies.size();) {
    const int to = copies[i].rank;
    const size_t first = i;
    double bytes = 0;
    for (; i < copies.size() && copies[i].rank == to; ++i) bytes += copies[i].bytes;
    delay += static_cast<double>(i - first) * rates_.copy(pitched);
    AddTask(stream, Overhead::kBatch, delay, rates_.Copy(own, to, bytes, pitched),
            fmt::format("{} {}copies to rank {}", i - first, pitched ? "pitched " : "", to));
    delay = 0;
  }
}

std::vector<Translator::PendingWait> Translator::Ask(const Context& context,
                                                     const std::vector<nccl::LoweredSync>& syncs,
                                                     int first, int count) {
  std::vector<PendingWait> waits;
  for (int i = first; i < first + count; ++i) {
    const nccl::LoweredSync& sync = syncs[static_cast<size_t>(i)];
    const CounterKey key = KeyOf(context.program->rank, context.program->lane, sync.counter);
    CounterState& counter = counters_[key];
    const int64_t target = counter.base + sync.value;
    if (target <= counter.asked) continue;
    counter.asked = target;
    waits.push_back({0, key, target});
  }
  return waits;
}

void Translator::AddWait(int stream, Overhead overhead, double delay,
                         const std::vector<PendingWait>& waits, std::string what) {
  const int task = AddTask(stream, overhead, delay, {}, std::move(what));
  for (PendingWait wait : waits) {
    wait.task = task;
    waits_.push_back(wait);
  }
}

// Signals and waits of a batch run in its order; neighbours of a kind are one task.
void Translator::AddMemoryOps(const Context& context, const Command& command, int stream) {
  const std::vector<nccl::LoweredSync>& syncs = context.lowered->memory_ops;
  const int end = command.first + command.count;
  for (int i = command.first; i < end;) {
    const nccl::LoweredSync& head = syncs[static_cast<size_t>(i)];
    const int first = i;
    while (i < end && syncs[static_cast<size_t>(i)].wait == head.wait) ++i;
    if (head.wait) {
      const auto waits = Ask(context, syncs, first, i - first);
      const auto count = static_cast<int>(waits.size());
      if (count == 0) continue;
      AddWait(stream, Overhead::kMemoryOp, count * rates_.wait(), waits,
              fmt::format("wait for {}{}", ToString(head.counter), OthersToo(count)));
      continue;
    }
    const int task = AddTask(stream, Overhead::kMemoryOp, (i - first) * rates_.signal(), {},
                             fmt::format("signal {} to rank {}{}", Name(head.counter.kind),
                                         head.peer, OthersToo(i - first)));
    for (int s = first; s < i; ++s) {
      const nccl::LoweredSync& sync = syncs[static_cast<size_t>(s)];
      counters_[KeyOf(sync.peer, context.program->lane, sync.counter)].increments.push_back(
          {task, rates_.signal_flight()});
    }
  }
}

// All transfers of a group run together; those to one peer on one context one after the other.
// Operations of one communicator run in the order of issue, whatever their streams.
void Translator::AddSends(const Context& context, const Command& command, int stream) {
  const Program& program = *context.program;
  const auto [rail, added] =
      rails_.emplace(std::pair(program.rank, static_cast<int>(program.lane)), kNoTask);
  Follow(stream, rail->second, 0);
  const int start = AddTask(stream, Overhead::kNccl, rates_.put(), {},
                            fmt::format("group of {} puts", command.count));
  std::map<std::pair<int, int>, int> ends;                         // peer, context: last task
  std::vector<std::pair<CounterKey, std::pair<int, int>>> raised;  // counter, its chain
  StreamState& state = states_[static_cast<size_t>(stream)];
  for (int i = command.first; i < command.first + command.count; ++i) {
    const nccl::LoweredSend& send = context.lowered->sends[static_cast<size_t>(i)];
    const std::pair chain(send.peer, nccl::RailSignalOf(send.counter).context);
    const auto [end, first] = ends.emplace(chain, start);
    if (send.bytes > 0) {
      state.last = end->second;
      end->second = AddTask(stream, Overhead::kNone, 0,
                            rates_.Put(program.rank, send.peer, static_cast<double>(send.bytes)),
                            fmt::format("put to rank {}, context {}", send.peer, chain.second));
    }
    const CounterKey key = KeyOf(send.peer, program.lane, send.counter);
    if (rates_.signals_follow_group()) {
      raised.emplace_back(key, chain);
    } else {
      counters_[key].increments.push_back({end->second, rates_.put_flight()});
    }
  }
  for (const auto& [chain, task] : ends) state.pending.push_back({task, 0});
  state.last = kNoTask;
  rail->second = AddTask(stream, Overhead::kNone, 0, {}, "end of the group");
  for (const auto& [key, chain] : raised) {
    counters_[key].increments.push_back({rail->second, rates_.put_flight()});
  }
}

void Translator::AddRailWaits(const Context& context, const Command& command, int stream) {
  const Program& program = *context.program;
  const auto& syncs = context.lowered->rail_waits;
  const auto waits = Ask(context, syncs, command.first, command.count);
  if (waits.empty()) return;
  int& rail = rails_.emplace(std::pair(program.rank, static_cast<int>(program.lane)), kNoTask)
                  .first->second;
  Follow(stream, rail, 0);
  AddWait(stream, Overhead::kNccl, rates_.put_wait(), waits,
          fmt::format("wait for {}{}", ToString(syncs[static_cast<size_t>(command.first)].counter),
                      OthersToo(static_cast<int>(waits.size()))));
  rail = states_[static_cast<size_t>(stream)].last;
}

void Translator::AddSum(const Context& context, const Command& command, int stream) {
  const nccl::LoweredSum& sum = context.lowered->sums[static_cast<size_t>(command.first)];
  const int own = context.program->rank;
  std::vector<Rates::Access> accesses{{own, 0}};
  double elems = 0;
  double operands = 0;
  for (const auto& item : sum.items) {
    const auto count = static_cast<double>(item.elems);
    // What is added to is read, too. A refresh reads dst and, where nothing differs, writes
    // nothing.
    const double uses = sum.accumulate ? 2 : 1;
    AccessTo(own, &accesses).bytes += count * uses * static_cast<double>(ItemSize(item.dst_dtype));
    for (const auto& source : item.sources) {
      const int rank = context.lowered->bases[static_cast<size_t>(source.base)].rank;
      AccessTo(rank, &accesses).bytes += count * static_cast<double>(ItemSize(item.src_dtype));
    }
    elems += count;
    operands += count * static_cast<double>(item.sources.size());
  }
  if (elems == 0) return;
  const bool whole_device = sum.kind == nccl::SumKind::kCast || sum.kind == nccl::SumKind::kRefresh;
  AddTask(stream, Overhead::kKernel, rates_.kernel(),
          rates_.Kernel(own, accesses, operands / elems, whole_device),
          fmt::format("{} of {} items", NameOf(sum.kind), sum.items.size()));
}

void Translator::AddZero(const Context& context, const Command& command, int stream) {
  double bytes = 0;
  for (const auto& item : context.lowered->zeros[static_cast<size_t>(command.first)]) {
    bytes += static_cast<double>(item.bytes);
  }
  AddTask(stream, Overhead::kKernel, rates_.kernel(), rates_.Zero(context.program->rank, bytes),
          "zero");
}

void Translator::ResolveWaits() {
  for (const PendingWait& wait : waits_) {
    const std::vector<Dependency>& increments = counters_[wait.counter].increments;
    if (wait.target > static_cast<int64_t>(increments.size())) {
      const TaskInfo& info = infos_[static_cast<size_t>(wait.task)];
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("simulation: rank {}, '{}': expected {} increments, the programs make "
                      "{}; `tide verify` says more",
                      streams_[static_cast<size_t>(info.stream)].rank, info.what, wait.target,
                      increments.size()));
    }
    tasks_[static_cast<size_t>(wait.task)].after.push_back(
        increments[static_cast<size_t>(wait.target) - 1]);
  }
  waits_.clear();
}

}  // namespace tide::sim
