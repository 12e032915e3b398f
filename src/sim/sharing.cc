#include "sim/sharing.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace tide::sim {
namespace {

// Levels that differ by rounding only are one.
constexpr double kSame = 1 + 1e-9;
// A flow with no more than this to go has ended: less than a nanosecond on any link.
constexpr double kLeftoverBytes = 1;
// Of the time now, which is rounded: what a flow moves in as much may be to go at its end.
constexpr double kRounding = 4 * std::numeric_limits<double>::epsilon();

}  // namespace

Sharing::Sharing(std::vector<double> capacities)
    : capacities_(std::move(capacities)),
      times_(capacities_.size()),
      used_(capacities_.size()),
      weight_(capacities_.size()),
      rising_(capacities_.size()) {}

void Sharing::Start(int id, const Flow& flow, double now) {
  Settle(now);
  active_.push_back({id, &flow, flow.bytes});
  stale_ = true;
}

double Sharing::NextEnd() {
  if (active_.empty()) return std::numeric_limits<double>::infinity();
  if (!stale_) return next_end_;
  Share();
  stale_ = false;
  next_end_ = std::numeric_limits<double>::infinity();
  for (const Active& active : active_) {
    next_end_ = std::min(next_end_, settled_ + active.left / active.rate);
  }
  return next_end_;
}

std::vector<Sharing::Ended> Sharing::Finish(double now) {
  Settle(now);
  std::vector<Ended> ended;
  const auto at_end = [now](const Active& active) {
    return active.left <= std::max(kLeftoverBytes, active.rate * now * kRounding);
  };
  for (const Active& active : active_) {
    if (at_end(active)) ended.push_back({active.id, active.limited});
  }
  if (ended.empty()) return ended;
  std::erase_if(active_, at_end);
  stale_ = true;
  return ended;
}

void Sharing::Settle(double now) {
  const double seconds = now - settled_;
  settled_ = now;
  if (seconds <= 0 || active_.empty()) return;
  touched_.clear();
  for (Active& active : active_) {
    active.left -= active.rate * seconds;
    active.limited[static_cast<size_t>(active.limited_by)] += seconds;
    for (const Use& use : active.flow->uses) {
      times_[static_cast<size_t>(use.resource)].amount += active.rate * use.per_byte * seconds;
      touched_.push_back(use.resource);
    }
  }
  std::sort(touched_.begin(), touched_.end());
  touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
  for (const int resource : touched_) times_[static_cast<size_t>(resource)].busy += seconds;
}

void Sharing::Share() {
  touched_.clear();
  std::vector<size_t> open;
  for (size_t i = 0; i < active_.size(); ++i) {
    open.push_back(i);
    for (const Use& use : active_[i].flow->uses) {
      const auto r = static_cast<size_t>(use.resource);
      if (rising_[r]++ == 0) touched_.push_back(use.resource);
      weight_[r] += use.per_byte;
    }
  }
  std::vector<size_t> rest;
  while (!open.empty()) {
    const double level = Level(open);
    rest.clear();
    for (const size_t i : open) {
      Active& active = active_[i];
      active.limited_by = StoppedBy(active, level);
      if (active.limited_by < 0) {
        rest.push_back(i);
      } else {
        active.rate = level;
      }
    }
    for (const size_t i : open) {
      const Active& active = active_[i];
      if (active.limited_by < 0) continue;
      for (const Use& use : active.flow->uses) {
        const auto r = static_cast<size_t>(use.resource);
        used_[r] += active.rate * use.per_byte;
        weight_[r] -= use.per_byte;
        --rising_[r];
      }
    }
    open.swap(rest);
  }
  for (const int resource : touched_) {
    const auto r = static_cast<size_t>(resource);
    used_[r] = weight_[r] = 0;
  }
}

double Sharing::Level(const std::vector<size_t>& open) const {
  double level = std::numeric_limits<double>::infinity();
  for (const size_t i : open) level = std::min(level, active_[i].flow->limit);
  for (const int resource : touched_) {
    const auto r = static_cast<size_t>(resource);
    if (rising_[r] > 0) level = std::min(level, (capacities_[r] - used_[r]) / weight_[r]);
  }
  return level;
}

int Sharing::StoppedBy(const Active& active, double level) const {
  for (const Use& use : active.flow->uses) {
    const auto r = static_cast<size_t>(use.resource);
    if (capacities_[r] - used_[r] <= level * kSame * weight_[r]) {
      return static_cast<int>(KindOf(use.resource));
    }
  }
  return active.flow->limit <= level * kSame ? kResourceKinds : -1;
}

}  // namespace tide::sim
