#include "verify/simulate.h"

#include <utility>

namespace tide::verify {
namespace {

// A few milliseconds of work.
constexpr int64_t kStepsBetweenChecks = 4096;

bool IsRecord(const Step& step) {
  return step.op != nullptr ? step.op->kind == OpKind::kRecord
                            : step.caller->kind == CallerStep::Kind::kRecord;
}

}  // namespace

Simulation::Simulation(const Model& model, std::vector<std::vector<int>> tracks, bool pacing,
                       Relaxed relaxed)
    : model_(model),
      tracks_(std::move(tracks)),
      pacing_(pacing),
      relaxed_(relaxed),
      cursors_(tracks_.size()),
      counters_(model.counters().size()),
      events_(static_cast<size_t>(model.events())),
      counter_waiters_(model.counters().size()),
      event_waiters_(static_cast<size_t>(model.events())) {}

std::vector<int> Simulation::Run(const std::function<void(const Step&)>& execute,
                                 const std::function<void()>& check_interrupt) {
  int64_t executed = 0;
  for (size_t t = tracks_.size(); t > 0; --t) runnable_.push_back(static_cast<int>(t) - 1);
  while (!runnable_.empty()) {
    const auto track = static_cast<size_t>(runnable_.back());
    runnable_.pop_back();
    const auto& steps = tracks_[track];
    for (size_t& at = cursors_[track]; at < steps.size(); ++at) {
      const Step& step = model_.steps()[static_cast<size_t>(steps[at])];
      if (step.pacing() && !pacing_) continue;
      if (!Ready(step)) {
        auto& waiters = step.counter >= 0 ? counter_waiters_[static_cast<size_t>(step.counter)]
                                          : event_waiters_[static_cast<size_t>(step.event)];
        waiters.push_back(static_cast<int>(track));
        break;
      }
      if (executed++ % kStepsBetweenChecks == 0) check_interrupt();
      execute(step);
      Complete(step);
    }
  }
  std::vector<int> blocked;
  for (size_t t = 0; t < tracks_.size(); ++t) {
    if (cursors_[t] < tracks_[t].size()) blocked.push_back(tracks_[t][cursors_[t]]);
  }
  return blocked;
}

bool Simulation::Ready(const Step& step) const {
  const bool relaxed = &step == relaxed_.step;
  if (relaxed && !relaxed_.weakened) return true;
  if (step.op != nullptr && step.op->kind == OpKind::kWait) {
    return counters_[static_cast<size_t>(step.counter)] >= step.target - (relaxed ? 1 : 0);
  }
  return step.event < 0 || IsRecord(step) || events_[static_cast<size_t>(step.event)] != 0;
}

void Simulation::Complete(const Step& step) {
  if (step.event >= 0 && IsRecord(step)) {
    events_[static_cast<size_t>(step.event)] = 1;
    Wake(&event_waiters_[static_cast<size_t>(step.event)]);
  } else if (step.op != nullptr && step.op->kind == OpKind::kSignal) {
    Increase(step.counter);
  } else if (step.op != nullptr && step.op->kind == OpKind::kPut) {
    for (size_t i = 0; i < step.op->puts.size(); ++i) Increase(model_.put_counter(step, i));
  }
}

void Simulation::Increase(int counter) {
  ++counters_[static_cast<size_t>(counter)];
  Wake(&counter_waiters_[static_cast<size_t>(counter)]);
}

void Simulation::Wake(std::vector<int>* waiting) {
  runnable_.insert(runnable_.end(), waiting->begin(), waiting->end());
  waiting->clear();
}

}  // namespace tide::verify
