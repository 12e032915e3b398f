#include "fabric/nccl/executor.h"

#include <algorithm>
#include <utility>

#include "tide/error.h"

namespace tide::nccl {

Executor::Executor(int rank, const Topology& topology, Device& device,
                   const Communicators& communicators, const Segments& segments,
                   int counter_segment, Counters& counters, Watchdog& watchdog)
    : rank_(rank),
      topology_(topology),
      device_(device),
      communicators_(communicators),
      segments_(segments),
      counter_segment_(counter_segment),
      counters_(counters),
      watchdog_(watchdog) {}

Executor::~Executor() {
  for (const LaneState& state : lanes_) {
    for (const auto& [name, stream] : state.streams) device_.DestroyStream(stream);
    for (const EventHandle event : state.events) device_.DestroyEvent(event);
  }
  for (const Stream stream : spare_) device_.DestroyStream(stream);
  for (const EventHandle event : ends_) device_.DestroyEvent(event);
}

// Every stream of a program waits for a peer, be it through an event of another one.
Stream Executor::TakeStream() {
  if (spare_.empty()) return device_.CreateStream();
  const Stream stream = spare_.back();
  spare_.pop_back();
  return stream;
}

std::vector<EventHandle> Executor::MarkEnds() {
  size_t count = 0;
  for (const LaneState& state : lanes_) {
    for (const auto& [name, stream] : state.streams) {
      if (count == ends_.size()) ends_.push_back(device_.CreateEvent());
      device_.Record(ends_[count++], stream);
    }
  }
  return ends_;
}

std::unique_ptr<Kernel> Executor::MakeKernel(const LoweredSum& sum) {
  switch (sum.kind) {
    case SumKind::kSum:
      break;
    case SumKind::kCast:
      return device_.MakeCast(sum.items);
    case SumKind::kRefresh:
      return device_.MakeRefresh(sum.items);
    case SumKind::kMulticast:
      return device_.MakeMulticastSum(sum.items);
  }
  return device_.MakeSum(sum.items);
}

std::shared_ptr<LoweredProgram> Executor::Prepare(const Program& program) {
  auto prepared = std::make_shared<LoweredProgram>();
  prepared->lowered = Lower(program, segments_.multicast() ? Reach::kMulticast : Reach::kUnicast);
  prepared->lane = program.lane;
  LaneState& state = lane(program.lane);
  for (const std::string& name : prepared->lowered.streams) {
    const auto [found, added] = state.streams.emplace(name, nullptr);
    if (added) found->second = TakeStream();
    prepared->streams.push_back(found->second);
  }
  while (static_cast<int>(state.events.size()) < prepared->lowered.events) {
    state.events.push_back(device_.CreateEvent());
  }
  for (const LoweredSum& sum : prepared->lowered.sums) {
    prepared->sums.push_back(MakeKernel(sum));
  }
  for (const auto& zeros : prepared->lowered.zeros) {
    prepared->zeros.push_back(device_.MakeZero(zeros));
  }
  std::erase_if(programs_, [](const auto& known) { return known.expired(); });
  programs_.push_back(prepared);
  return prepared;
}

void Executor::KeepPrograms() {
  for (const auto& program : programs_) new std::shared_ptr<LoweredProgram>(program.lock());
  programs_.clear();
}

void Executor::ResolveBases(const Call& call, const Lowered& lowered) {
  bases_.clear();
  for (const Base& base : lowered.bases) {
    const BufferAddress& address = call.binding->buffers[static_cast<size_t>(base.buffer)];
    if (base.rank == kWholeNode) {
      bases_.push_back(segments_.ResolveMulticast(address.symmetric));
    } else if (address.symmetric.segment < 0) {
      bases_.push_back(static_cast<char*>(address.local));
    } else {
      bases_.push_back(segments_.Resolve(base.rank, address.symmetric));
    }
  }
}

EventHandle Executor::Run(const Call& call, const std::shared_ptr<LoweredProgram>& program) {
  const Lowered& lowered = program->lowered;
  events_ = &lane(program->lane).events;
  ResolveBases(call, lowered);
  watched_ = watchdog_.Claim();
  if (call.streams) device_.Record(EventOf(kReadyEvent), call.streams->ready);
  for (const Command& command : lowered.commands) Issue(call, *program, command);
  counters_.Advance(*call.program);
  if (call.streams) {
    if (lowered.records_read_done) device_.Await(call.streams->done, EventOf(kReadDoneEvent));
    device_.Await(call.streams->done, EventOf(kDoneEvent));
  }
  watched_->has_ready = call.streams.has_value();
  watched_->lane = program->lane;
  watched_->identity = call.identity;
  watched_->program = program;
  watched_->lowered = &lowered;
  watchdog_.Arm(watched_);
  return EventOf(kDoneEvent);
}

// Calls of a lane that are under way together share its events, but not the two that are polled.
EventHandle Executor::EventOf(int event) const {
  if (event == kReadyEvent) return watched_->ready;
  if (event == kDoneEvent) return watched_->done;
  return (*events_)[static_cast<size_t>(event)];
}

void Executor::Issue(const Call& call, LoweredProgram& program, const Command& command) {
  const Lowered& lowered = program.lowered;
  const Stream stream = program.streams[static_cast<size_t>(command.stream)];
  const auto first = static_cast<size_t>(command.first);
  switch (command.kind) {
    case CommandKind::kCopies:
      IssueCopies(lowered, command, stream);
      return;
    case CommandKind::kPitched:
      IssuePitched(lowered, command, stream);
      return;
    case CommandKind::kMemoryOps:
      IssueMemoryOps(program.lane, lowered, command, stream);
      return;
    case CommandKind::kSends:
      IssueSends(call, lowered, command, stream);
      return;
    case CommandKind::kRailWaits:
      IssueRailWaits(program.lane, lowered, command, stream);
      return;
    case CommandKind::kRecord:
      device_.Record(EventOf(command.first), stream);
      return;
    case CommandKind::kAwait:
      // The caller gives one point in time: it is ready and the gate is open.
      if (command.first == kReadyEvent || command.first == kGateEvent) {
        if (call.streams) device_.Await(stream, EventOf(kReadyEvent));
      } else {
        device_.Await(stream, EventOf(command.first));
      }
      return;
    case CommandKind::kSum: {
      const LoweredSum& sum = lowered.sums[first];
      kernels::cuda::SumCall sum_call;
      sum_call.scale = sum.scaled ? call.binding->scale : 1.0F;
      sum_call.accumulate = sum.accumulate;
      program.sums[first]->Launch(reinterpret_cast<const void* const*>(bases_.data()), sum_call,
                                  stream);
      return;
    }
    case CommandKind::kZero:
      program.zeros[first]->Launch(reinterpret_cast<const void* const*>(bases_.data()), {}, stream);
      return;
  }
}

void Executor::IssueCopies(const Lowered& lowered, const Command& command, Stream stream) {
  copies_.clear();
  for (int i = command.first; i < command.first + command.count; ++i) {
    const LoweredCopy& copy = lowered.copies[static_cast<size_t>(i)];
    copies_.push_back({At(copy.dst), At(copy.src), copy.bytes});
  }
  device_.Copy(copies_, stream);
}

void Executor::IssuePitched(const Lowered& lowered, const Command& command, Stream stream) {
  pitched_.clear();
  for (int i = command.first; i < command.first + command.count; ++i) {
    const LoweredPitched& copy = lowered.pitched[static_cast<size_t>(i)];
    pitched_.push_back(
        {At(copy.dst), At(copy.src), copy.row_bytes, copy.rows, copy.dst_pitch, copy.src_pitch});
  }
  device_.CopyPitched(pitched_, stream);
}

void Executor::IssueMemoryOps(Lane lane, const Lowered& lowered, const Command& command,
                              Stream stream) {
  memory_ops_.clear();
  for (int i = command.first; i < command.first + command.count; ++i) {
    const LoweredSync& sync = lowered.memory_ops[static_cast<size_t>(i)];
    const SegmentAddress at{counter_segment_, counters_.Offset(lane, sync.counter)};
    const int holder = sync.wait ? rank_ : sync.peer;
    auto* address = reinterpret_cast<uint64_t*>(segments_.Resolve(holder, at));
    if (!sync.wait) {
      memory_ops_.push_back({false, address, counters_.Raise(lane, sync.counter, sync.peer)});
      continue;
    }
    const uint64_t target = counters_.Target(lane, sync.counter, sync.value);
    // One queue waits for a counter: what it has waited for already needs no second wait.
    if (counters_.Ask(lane, sync.counter, target) == 0) continue;
    memory_ops_.push_back({true, address, target});
    watched_->waits.push_back({command.stream, sync.counter, target, true});
  }
  if (!memory_ops_.empty()) device_.MemoryOps(memory_ops_, stream);
}

void Executor::IssueSends(const Call& call, const Lowered& lowered, const Command& command,
                          Stream stream) {
  const Lane lane = call.program->lane;
  transfers_.clear();
  for (int i = command.first; i < command.first + command.count; ++i) {
    const LoweredSend& send = lowered.sends[static_cast<size_t>(i)];
    const RailSignal signal = RailSignalOf(send.counter);
    Transfer& transfer = transfers_.emplace_back();
    transfer.peer = topology_.Node(send.peer);
    transfer.signal = signal.signal;
    transfer.context = signal.context;
    if (send.bytes == 0) continue;
    const SegmentAddress& to =
        call.binding->buffers[static_cast<size_t>(send.dst_buffer)].symmetric;
    transfer.src = At(send.src);
    transfer.bytes = send.bytes;
    transfer.window = segments_.RailWindow(lane, to.segment);
    transfer.offset = to.offset + send.dst_offset;
  }
  communicators_.rail(lane)->Send(transfers_, stream);
}

void Executor::IssueRailWaits(Lane lane, const Lowered& lowered, const Command& command,
                              Stream stream) {
  rail_waits_.clear();
  for (int i = command.first; i < command.first + command.count; ++i) {
    const LoweredSync& sync = lowered.rail_waits[static_cast<size_t>(i)];
    const uint64_t target = counters_.Target(lane, sync.counter, sync.value);
    const uint64_t more = counters_.Ask(lane, sync.counter, target);
    if (more == 0) continue;
    const RailSignal signal = RailSignalOf(sync.counter);
    rail_waits_.push_back({topology_.Node(sync.counter.producer), signal.signal, signal.context,
                           static_cast<int>(more)});
    watched_->waits.push_back({command.stream, sync.counter, target, false});
  }
  if (!rail_waits_.empty()) communicators_.rail(lane)->Wait(rail_waits_, stream);
}

}  // namespace tide::nccl
