#include "verify/model.h"

#include <fmt/format.h>

#include <numeric>

namespace tide::verify {
namespace {

const char* Name(CallerQueue queue) {
  switch (queue) {
    case CallerQueue::kMain:
      return "caller";
    case CallerQueue::kFreeAllGather:
      return "caller, free all_gather";
    case CallerQueue::kFreeReduceScatter:
      return "caller, free reduce_scatter";
  }
  return "?";
}

}  // namespace

Model::Model(const Input& input) : input_(input) {
  const int ranks = input.topology.Ranks();
  fifos_.resize(static_cast<size_t>(ranks));
  places_.resize(input.calls.size() * static_cast<size_t>(ranks));
  std::vector<int> in_order(input.calls.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    const bool has_order = !input.issue_order.empty() && !input.issue_order[r].empty();
    const auto& order = has_order ? input.issue_order[r] : in_order;
    for (const int call : order) AddCall(call, rank);
    AddCaller(input.after, rank);
  }
}

void Model::AddCaller(const std::vector<CallerStep>& steps, int rank) {
  for (const CallerStep& caller : steps) {
    Step& step = AddStep(QueueOf(rank, Name(caller.queue)), caller.call, rank);
    step.caller = &caller;
    if (caller.kind == CallerStep::Kind::kAwait || caller.kind == CallerStep::Kind::kRecord) {
      step.event = EventOf(caller.call, rank, caller.event);
      if (caller.kind == CallerStep::Kind::kAwait) ++event_waits_[static_cast<size_t>(step.event)];
    }
  }
}

void Model::AddCall(int call, int rank) {
  const Call& spec = input_.calls[static_cast<size_t>(call)];
  AddCaller(spec.before, rank);
  const Program& program = ProgramOf(call, rank);
  auto& places = places_[PlacesIndex(call, rank)];
  for (const Buffer& buffer : program.buffers) {
    const auto found = spec.places.find({buffer.kind, buffer.index});
    places.push_back(found != spec.places.end() ? found->second : Place());
  }
  std::vector<int> queues;
  for (const std::string& name : program.queues) {
    queues.push_back(QueueOf(rank, fmt::format("{} {}", tide::Name(program.lane), name)));
  }
  for (const Operation& op : program.operations) {
    Step& step = AddStep(queues[static_cast<size_t>(op.queue)], call, rank);
    step.op = &op;
    fifos_[static_cast<size_t>(rank)].push_back(static_cast<int>(steps_.size()) - 1);
    switch (op.kind) {
      case OpKind::kSignal:
        step.counter = CounterOf(op.peer, program.lane, op.counter);
        break;
      case OpKind::kWait:
        step.counter = CounterOf(rank, program.lane, op.counter);
        step.target = bases_[static_cast<size_t>(step.counter)] + op.value;
        break;
      case OpKind::kPut:
        step.puts = static_cast<int>(put_counters_.size());
        for (const PutPiece& put : op.puts) {
          put_counters_.push_back(
              CounterOf(op.peer, program.lane, {put.signal, rank, put.signal_index}));
        }
        break;
      case OpKind::kRecord:
      case OpKind::kAwait:
        // A gate that nobody closed is open: the weakest order.
        if (op.event.kind == EventKind::kGate) break;
        step.event = EventOf(call, rank, op.event);
        if (op.kind == OpKind::kAwait) ++event_waits_[static_cast<size_t>(step.event)];
        break;
      default:
        break;
    }
  }
  for (const Increment& increment : program.increments) {
    bases_[static_cast<size_t>(CounterOf(rank, program.lane, increment.counter))] +=
        increment.value;
  }
}

Step& Model::AddStep(int queue, int call, int rank) {
  auto& steps = queues_[static_cast<size_t>(queue)].steps;
  steps.push_back(static_cast<int>(steps_.size()));
  Step& step = steps_.emplace_back();
  step.call = call;
  step.rank = rank;
  step.queue = queue;
  step.tick = static_cast<uint32_t>(steps.size());
  return step;
}

int Model::QueueOf(int rank, const std::string& name) {
  const auto [found, added] =
      queue_index_.try_emplace({rank, name}, static_cast<int>(queues_.size()));
  if (added) queues_.push_back({rank, name, {}});
  return found->second;
}

int Model::CounterOf(int rank, Lane lane, const Counter& counter) {
  auto key = static_cast<uint64_t>(rank);
  key = key * kLanes + static_cast<uint64_t>(lane);
  key = key * kCounterKinds + static_cast<uint64_t>(counter.kind);
  key = key * kMaxCounterIndices + static_cast<uint64_t>(counter.index);
  key = key * static_cast<uint64_t>(input_.topology.Ranks()) +
        static_cast<uint64_t>(counter.producer);
  const auto [found, added] = counter_index_.try_emplace(key, static_cast<int>(counters_.size()));
  if (added) {
    counters_.push_back({rank, lane, counter});
    bases_.push_back(0);
  }
  return found->second;
}

int Model::EventOf(int call, int rank, const Event& event) {
  auto key = static_cast<uint64_t>(call);
  key = key * static_cast<uint64_t>(input_.topology.Ranks()) + static_cast<uint64_t>(rank);
  key = (key * 8 + static_cast<uint64_t>(event.kind)) << 24 | static_cast<uint64_t>(event.index);
  const auto [found, added] = event_index_.try_emplace(key, events());
  if (added) event_waits_.push_back(0);
  return found->second;
}

std::vector<std::vector<int>> Model::Queues() const {
  std::vector<std::vector<int>> all;
  for (const Queue& queue : queues_) all.push_back(queue.steps);
  return all;
}

std::vector<std::vector<int>> Model::Fifos() const {
  std::vector<std::vector<int>> all = fifos_;
  for (const Queue& queue : queues_) {
    const bool of_caller =
        !queue.steps.empty() && steps_[static_cast<size_t>(queue.steps[0])].caller != nullptr;
    if (of_caller) all.push_back(queue.steps);
  }
  return all;
}

Place Model::place(const Step& step, Ref ref) const {
  Place place = places_[PlacesIndex(step.call, step.rank)][static_cast<size_t>(ref.buffer)];
  place.offset += ref.offset;
  return place;
}

int Model::memory(int object, int rank) const {
  const bool per_node = input_.objects[static_cast<size_t>(object)].per_node;
  const Topology& topology = input_.topology;
  return object * topology.Ranks() + (per_node ? topology.Rank(topology.Node(rank), 0) : rank);
}

int Model::memories() const {
  return static_cast<int>(input_.objects.size()) * input_.topology.Ranks();
}

std::string Model::MemoryName(int memory) const {
  const int rank = memory % input_.topology.Ranks();
  const Object& object = input_.objects[static_cast<size_t>(memory / input_.topology.Ranks())];
  return object.per_node ? fmt::format("{} of node {}", object.name, input_.topology.Node(rank))
                         : fmt::format("{} of rank {}", object.name, rank);
}

bool Model::lane_owned(int memory) const {
  return input_.objects[static_cast<size_t>(memory / input_.topology.Ranks())].lane_owned;
}

Site Model::SiteOf(const Step& step) const {
  Site site{step.call, step.rank, {}};
  if (step.op != nullptr) {
    site.operation = ToString(program(step), *step.op);
    return site;
  }
  const CallerStep& caller = *step.caller;
  switch (caller.kind) {
    case CallerStep::Kind::kAwait:
      site.operation = fmt::format("caller awaits {}", ToString(caller.event));
      break;
    case CallerStep::Kind::kRecord:
      site.operation = fmt::format("caller records {}", ToString(caller.event));
      break;
    default:
      site.operation = "caller " + caller.what;
  }
  return site;
}

}  // namespace tide::verify
