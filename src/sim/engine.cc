#include "sim/engine.h"

#include <cstdint>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>

namespace tide::sim {
namespace {

constexpr int64_t kEventsBetweenChecks = 4096;

class Engine {
 public:
  Engine(const std::vector<Work>& tasks, const std::vector<double>& capacities)
      : tasks_(tasks),
        sharing_(capacities),
        timings_(tasks.size()),
        missing_(tasks.size()),
        followers_(tasks.size()) {
    for (size_t t = 0; t < tasks.size(); ++t) {
      missing_[t] = static_cast<int>(tasks[t].after.size());
      for (const Dependency& dependency : tasks[t].after) {
        followers_[static_cast<size_t>(dependency.task)].push_back(
            {static_cast<int>(t), dependency.lag});
      }
    }
  }

  Outcome Run(const std::function<void()>& check_interrupt) {
    for (size_t t = 0; t < tasks_.size(); ++t) {
      if (missing_[t] == 0) Start(static_cast<int>(t));
    }
    int64_t events = 0;
    while (true) {
      if (events++ % kEventsBetweenChecks == 0) check_interrupt();
      const double flow_end = sharing_.NextEnd();
      const bool heap_first = !delays_.empty() && delays_.top().time <= flow_end;
      if (!heap_first && flow_end == std::numeric_limits<double>::infinity()) break;
      if (heap_first) {
        EndDelay();
      } else {
        for (const Sharing::Ended& ended : sharing_.Finish(flow_end)) {
          timings_[static_cast<size_t>(ended.id)].limited = ended.limited;
          End(ended.id, flow_end);
        }
      }
    }
    Outcome outcome{std::move(timings_), sharing_.resources(), {}};
    for (size_t t = 0; t < tasks_.size(); ++t) {
      if (missing_[t] > 0) outcome.stuck.push_back(static_cast<int>(t));
    }
    return outcome;
  }

 private:
  struct Event {
    double time = 0;
    int64_t order = 0;  // events of one time happen in the order of their making
    int task = 0;
    bool operator>(const Event& other) const {
      return std::tie(time, order) > std::tie(other.time, other.order);
    }
  };

  // timings_[task].start is known.
  void Start(int task) {
    const auto t = static_cast<size_t>(task);
    timings_[t].flows = timings_[t].start + tasks_[t].delay;
    delays_.push({timings_[t].flows, made_++, task});
  }

  void EndDelay() {
    const Event event = delays_.top();
    delays_.pop();
    const Flow& flow = tasks_[static_cast<size_t>(event.task)].flow;
    if (flow.bytes > 0) {
      sharing_.Start(event.task, flow, event.time);
    } else {
      End(event.task, event.time);
    }
  }

  void End(int task, double now) {
    timings_[static_cast<size_t>(task)].end = now;
    for (const Dependency& follower : followers_[static_cast<size_t>(task)]) {
      const auto f = static_cast<size_t>(follower.task);
      Timing& timing = timings_[f];
      if (timing.cause < 0 || now + follower.lag > timing.start) {
        timing.start = now + follower.lag;
        timing.cause = task;
      }
      if (--missing_[f] == 0) Start(follower.task);
    }
  }

  const std::vector<Work>& tasks_;
  Sharing sharing_;
  std::vector<Timing> timings_;
  std::vector<int> missing_;
  std::vector<std::vector<Dependency>> followers_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> delays_;
  int64_t made_ = 0;
};

}  // namespace

Outcome Run(const std::vector<Work>& tasks, const std::vector<double>& capacities,
            const std::function<void()>& check_interrupt) {
  return Engine(tasks, capacities).Run(check_interrupt);
}

}  // namespace tide::sim
