#include "sim/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tide/error.h"

namespace tide::sim {
namespace {

const char* Name(ResourceKind kind) {
  switch (kind) {
    case ResourceKind::kLinkOut:
      return "NVLink out";
    case ResourceKind::kLinkIn:
      return "NVLink in";
    case ResourceKind::kMemory:
      return "memory";
    case ResourceKind::kSms:
      return "multiprocessors";
    case ResourceKind::kRailOut:
      return "rail out";
    case ResourceKind::kRailIn:
      return "rail in";
  }
  return "";
}

const char* Name(Overhead overhead) {
  switch (overhead) {
    case Overhead::kNone:
      return "events, the caller";
    case Overhead::kBatch:
      return "starts of copies";
    case Overhead::kKernel:
      return "starts of kernels";
    case Overhead::kMemoryOp:
      return "memory operations";
    case Overhead::kNccl:
      return "starts of puts, signals between nodes";
    case Overhead::kCompute:
      return "compute";
  }
  return "";
}

// Of a flow that nothing but itself held back.
const char* OwnRate(Overhead overhead) {
  switch (overhead) {
    case Overhead::kKernel:
      return "a kernel's rate";
    case Overhead::kCompute:
      return Name(overhead);
    default:
      return "a copy's rate";
  }
}

class Summary {
 public:
  Summary(const Translator& translator, const Outcome& outcome)
      : translator_(translator), outcome_(outcome) {}

  SimulatedSpan SpanOf(int task) const {
    const TaskInfo& info = this->info(task);
    const StreamInfo& stream = translator_.streams()[static_cast<size_t>(info.stream)];
    return {stream.rank,        stream.name,      info.what,
            timing(task).start, timing(task).end, work(task).flow.bytes};
  }

  // From the last end back to the start, each step to whatever was waited for last.
  void FollowPath(int last, SimulationResult* result) const {
    std::map<std::string, double> limits;
    for (int task = last; task != kNoTask; task = timing(task).cause) {
      const Timing& at = timing(task);
      const Overhead overhead = info(task).overhead;
      limits[Name(overhead)] += at.flows - at.start;
      for (size_t kind = 0; kind < at.limited.size(); ++kind) {
        const bool own = kind == kResourceKinds;
        limits[own ? OwnRate(overhead) : Name(static_cast<ResourceKind>(kind))] += at.limited[kind];
      }
      const double before = at.cause == kNoTask ? 0 : timing(at.cause).end;
      limits[Name(overhead)] += at.start - before;
      if (at.end > at.start) result->critical_path.push_back(SpanOf(task));
    }
    std::reverse(result->critical_path.begin(), result->critical_path.end());
    for (const auto& [name, seconds] : limits) {
      if (seconds > 0) result->limits.push_back({name, seconds});
    }
    std::stable_sort(result->limits.begin(), result->limits.end(),
                     [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  }

  std::vector<SimulatedWait> Waits() const {
    std::vector<SimulatedWait> waits(translator_.streams().size());
    std::vector<double> ends(waits.size());
    for (int task = 0; task < tasks(); ++task) {
      const auto s = static_cast<size_t>(info(task).stream);
      const double waited = timing(task).start - ends[s];
      ends[s] = std::max(ends[s], timing(task).end);
      if (waited <= 0) continue;
      SimulatedWait& wait = waits[s];
      wait.waited_s += waited;
      if (waited <= wait.longest_s) continue;
      wait.longest_s = waited;
      wait.before = info(task).what;
      const int cause = timing(task).cause;
      wait.cause = fmt::format("rank {}: {}", SpanOf(cause).rank, info(cause).what);
    }
    std::vector<SimulatedWait> made;
    for (size_t s = 0; s < waits.size(); ++s) {
      if (waits[s].waited_s == 0) continue;
      waits[s].rank = translator_.streams()[s].rank;
      waits[s].stream = translator_.streams()[s].name;
      made.push_back(std::move(waits[s]));
    }
    std::stable_sort(made.begin(), made.end(),
                     [](const auto& a, const auto& b) { return a.rank < b.rank; });
    return made;
  }

  std::vector<SimulatedSpan> Timeline() const {
    std::vector<SimulatedSpan> spans;
    for (int task = 0; task < tasks(); ++task) {
      if (timing(task).end > timing(task).start) spans.push_back(SpanOf(task));
    }
    std::stable_sort(spans.begin(), spans.end(),
                     [](const auto& a, const auto& b) { return a.start_s < b.start_s; });
    return spans;
  }

  const Timing& timing(int task) const { return outcome_.timings[static_cast<size_t>(task)]; }

 private:
  int tasks() const { return static_cast<int>(translator_.tasks().size()); }
  const Work& work(int task) const { return translator_.tasks()[static_cast<size_t>(task)]; }
  const TaskInfo& info(int task) const { return translator_.infos()[static_cast<size_t>(task)]; }

  const Translator& translator_;
  const Outcome& outcome_;
};

std::vector<SimulatedResource> ResourcesOf(const Outcome& outcome,
                                           const std::vector<double>& capacities, double seconds) {
  std::vector<SimulatedResource> resources;
  for (size_t r = 0; r < outcome.resources.size(); ++r) {
    const ResourceTime& time = outcome.resources[r];
    if (time.busy == 0) continue;
    const ResourceKind kind = KindOf(static_cast<int>(r));
    resources.push_back({static_cast<int>(r) / kResourceKinds, Name(kind), time.busy,
                         kind == ResourceKind::kSms ? 0 : time.amount,
                         time.amount / (capacities[r] * seconds)});
  }
  return resources;
}

}  // namespace

Outcome RunTasks(const Translator& translator, const std::vector<double>& capacities,
                 const std::function<void()>& check_interrupt) {
  Outcome outcome = Run(translator.tasks(), capacities, check_interrupt);
  if (!outcome.stuck.empty()) {
    const auto first = static_cast<size_t>(outcome.stuck.front());
    const TaskInfo& info = translator.infos()[first];
    const StreamInfo& stream = translator.streams()[static_cast<size_t>(info.stream)];
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("simulation: {} operations never run, first '{}' of rank {}, {}; "
                            "`tide verify` says why",
                            outcome.stuck.size(), info.what, stream.rank, stream.name));
  }
  return outcome;
}

SimulationResult Summarise(const Translator& translator, const Outcome& outcome,
                           const std::vector<double>& capacities, const std::vector<int>& ends) {
  const Summary summary(translator, outcome);
  SimulationResult result;
  int last = kNoTask;
  for (const int end : ends) {
    const double seconds = end == kNoTask ? 0 : summary.timing(end).end;
    result.rank_seconds.push_back(seconds);
    if (seconds > result.seconds) last = end;
    result.seconds = std::max(result.seconds, seconds);
  }
  result.resources = ResourcesOf(outcome, capacities, result.seconds);
  result.waits = summary.Waits();
  result.timeline = summary.Timeline();
  summary.FollowPath(last, &result);
  return result;
}

}  // namespace tide::sim
