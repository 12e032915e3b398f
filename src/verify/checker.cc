#include "verify/checker.h"

#include <fmt/format.h>

#include <algorithm>

#include "tide/error.h"
#include "verify/simulate.h"

namespace tide::verify {

Checker::Checker(const Model& model, Findings* findings, Relaxed relaxed)
    : model_(model),
      findings_(*findings),
      relaxed_(relaxed),
      clocks_(model.queues().size()),
      history_{clocks_, [this](const Conflict& conflict) { ReportRace(conflict); }},
      dataflow_(model, &history_, findings),
      counters_(model.counters().size()),
      events_(static_cast<size_t>(model.events())) {
  for (int e = 0; e < model.events(); ++e) {
    events_[static_cast<size_t>(e)].waits_left = model.event_waits(e);
  }
}

std::vector<int> Checker::Run(const std::function<void()>& check_interrupt) {
  Simulation simulation(model_, model_.Queues(), /*pacing=*/false, relaxed_);
  auto blocked = simulation.Run([this](const Step& step) { Follow(step); }, check_interrupt);
  findings_.stats().accesses += history_.accesses;
  findings_.stats().pairs += history_.pairs;
  return blocked;
}

void Checker::Follow(const Step& step) {
  const bool relaxed = &step == relaxed_.step;
  if (relaxed_.step == nullptr || step.queue != relaxed_.step->queue) {
    Execute(step);
    return;
  }
  const bool waits =
      step.op != nullptr && (step.op->kind == OpKind::kWait || step.op->kind == OpKind::kAwait);
  if (passed_ && !waits && !used_) {
    used_ = true;
    in_time_ = substitute_ != nullptr;
  }
  passed_ |= relaxed;
  if (!relaxed || relaxed_.weakened) Execute(step);
  if (substitute_ == nullptr && KnowsRelaxed()) substitute_ = &step;
}

bool Checker::KnowsRelaxed() const {
  const Step& relaxed = *relaxed_.step;
  if (relaxed.event >= 0) {
    const auto& stamp = events_[static_cast<size_t>(relaxed.event)].stamp;
    return stamp.has_value() && KnowsStamp(*stamp);
  }
  const CounterLog& log = counters_[static_cast<size_t>(relaxed.counter)];
  if (static_cast<int64_t>(log.wires.size()) < relaxed.target) return false;
  for (int64_t i = log.covered; i < relaxed.target; ++i) {
    const Increment& increment = log.pending[static_cast<size_t>(i - log.covered)];
    if (!KnowsStamp(increment.stamp)) return false;
    if (increment.piece != kNone &&
        !clocks_.HasAcquired(increment.piece, static_cast<uint32_t>(relaxed.queue))) {
      return false;
    }
  }
  return true;
}

// Signals and records at the end of what the stamp covers touch no memory: knowing of what comes
// before them is enough.
bool Checker::KnowsStamp(const Stamp& stamp) const {
  const auto& steps = model_.queues()[stamp.queue].steps;
  uint32_t tick = stamp.tick;
  for (; tick > 0; --tick) {
    const Step& step = model_.steps()[static_cast<size_t>(steps[tick - 1])];
    const bool silent = step.op != nullptr &&
                        (step.op->kind == OpKind::kSignal || step.op->kind == OpKind::kRecord);
    if (!silent) break;
  }
  return clocks_.Now(static_cast<uint32_t>(relaxed_.step->queue), UINT32_MAX).Knows(stamp.queue) >=
         tick;
}

void Checker::Execute(const Step& step) {
  const auto queue = static_cast<uint32_t>(step.queue);
  const bool records = step.op != nullptr ? step.op->kind == OpKind::kRecord
                                          : step.caller->kind == CallerStep::Kind::kRecord;
  if (step.event >= 0) {
    EventLog& event = events_[static_cast<size_t>(step.event)];
    if (records) {
      if (event.waits_left > 0) event.stamp = clocks_.Now(queue, step.tick);
      return;
    }
    clocks_.Join(queue, *event.stamp);
    if (--event.waits_left == 0) event.stamp.reset();
    return;
  }
  if (step.op == nullptr) {
    dataflow_.Run(step, clocks_.ActorOf(queue, step.tick));
    return;
  }
  switch (step.op->kind) {
    case OpKind::kSignal:
      Produce(step.counter, {clocks_.Now(queue, step.tick), kNone, &step}, kNone);
      break;
    case OpKind::kWait:
      Wait(step);
      break;
    case OpKind::kPut:
      Put(step);
      break;
    case OpKind::kRecord:
    case OpKind::kAwait:
      break;  // the gate
    default:
      dataflow_.Run(step, clocks_.ActorOf(queue, step.tick));
  }
}

void Checker::Put(const Step& step) {
  const auto queue = static_cast<uint32_t>(step.queue);
  const Actor reader = clocks_.ActorOf(queue, step.tick);
  for (size_t i = 0; i < step.op->puts.size(); ++i) {
    const PutPiece& put = step.op->puts[i];
    const Actor writer = clocks_.NewPiece(queue, step.tick, step.op->peer, put.context);
    dataflow_.Put(step, put, reader, writer);
    Produce(model_.put_counter(step, i),
            {clocks_.Now(queue, step.tick - 1), writer.epoch.tick, &step}, writer.wire);
  }
}

int64_t Checker::KnownBefore(const CounterLog& log, const Stamp& stamp) {
  for (auto wait = log.waits.rbegin(); wait != log.waits.rend(); ++wait) {
    const Step& step = *wait->first;
    if (stamp.Knows(static_cast<uint32_t>(step.queue)) >= step.tick) return wait->second;
  }
  return 0;
}

bool Checker::CanOvertake(const CounterLog& log, uint32_t wire, int64_t from, int64_t to) {
  return std::any_of(log.wires.begin() + from, log.wires.begin() + std::max(from, to),
                     [wire](uint32_t other) { return other != wire; });
}

void Checker::Produce(int counter, Increment increment, uint32_t wire) {
  CounterLog& log = counters_[static_cast<size_t>(counter)];
  log.several_wires |= !log.wires.empty() && log.wires.back() != wire;
  if (log.several_wires && !log.waits.empty() &&
      CanOvertake(log, wire, KnownBefore(log, increment.stamp), log.waits.back().second)) {
    ReportAmbiguous(*log.waits.back().first, *increment.step);
  }
  log.wires.push_back(wire);
  log.pending.push_back(std::move(increment));
}

void Checker::Wait(const Step& step) {
  CounterLog& log = counters_[static_cast<size_t>(step.counter)];
  const int64_t target = step.target - (&step == relaxed_.step ? 1 : 0);
  if (target <= log.covered) return;
  if (log.several_wires) {
    const auto produced = static_cast<int64_t>(log.wires.size());
    for (int64_t later = target; later < produced; ++later) {
      const Increment& increment = log.pending[static_cast<size_t>(later - log.covered)];
      if (CanOvertake(log, log.wires[static_cast<size_t>(later)], KnownBefore(log, increment.stamp),
                      target)) {
        ReportAmbiguous(step, *increment.step);
        break;
      }
    }
  }
  const auto queue = static_cast<uint32_t>(step.queue);
  for (; log.covered < target; ++log.covered) {
    const Increment& increment = log.pending.front();
    clocks_.Join(queue, increment.stamp);
    if (increment.piece != kNone) clocks_.Acquire(increment.piece, queue, step.tick);
    log.pending.pop_front();
  }
  log.waits.emplace_back(&step, target);
}

const Step& Checker::StepOf(Epoch epoch) const {
  if (epoch.piece()) {
    const auto& piece = clocks_.piece(epoch.tick);
    epoch = {piece.queue, piece.tick};
  }
  const int index = model_.queues()[epoch.queue].steps[epoch.tick - 1];
  return model_.steps()[static_cast<size_t>(index)];
}

void Checker::ReportAmbiguous(const Step& wait, const Step& producer) {
  if (!reported_.insert({&wait, &producer}).second) return;
  Finding finding;
  finding.kind = FindingKind::kAmbiguous;
  finding.first = model_.SiteOf(wait);
  finding.second = model_.SiteOf(producer);
  finding.detail =
      "pieces of different contexts arrive in any order, so the wait can pass before the pieces "
      "that it is for";
  findings_.Add(std::move(finding));
}

void Checker::ReportRace(const Conflict& conflict) {
  const Step& earlier = StepOf(conflict.earlier);
  const Step& later = StepOf(conflict.later);
  if (!reported_.insert({&earlier, &later}).second) return;
  Finding finding;
  finding.kind = FindingKind::kRace;
  finding.first = model_.SiteOf(later);
  finding.second = model_.SiteOf(earlier);
  finding.region = model_.MemoryName(conflict.memory);
  finding.begin = conflict.begin;
  finding.end = conflict.end;
  finding.detail = fmt::format("the first {}, the second {}, and nothing orders them",
                               conflict.later_writes ? "writes" : "reads",
                               conflict.earlier_writes ? "writes" : "reads");
  findings_.Add(std::move(finding));
}

}  // namespace tide::verify
