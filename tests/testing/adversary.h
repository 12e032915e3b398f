// The schedule made for a fault: what an operation should have waited for is held back until
// nothing else moves.
#ifndef TIDE_TESTS_TESTING_ADVERSARY_H_
#define TIDE_TESTS_TESTING_ADVERSARY_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tide/program.h"
#include "verify/mutants.h"

namespace tide::testing {

inline bool MovesData(const Operation& op) {
  return op.kind != OpKind::kSignal && op.kind != OpKind::kWait && op.kind != OpKind::kRecord &&
         op.kind != OpKind::kAwait;
}

// The n-th operation of a rank's program that moves data. Mutants drop or change other operations,
// so this names the same one in all of them.
inline int DataOrdinal(const Program& program, size_t index) {
  return static_cast<int>(
      std::count_if(program.operations.begin(),
                    program.operations.begin() + static_cast<std::ptrdiff_t>(index), MovesData));
}

// Data operations to hold back, as (rank, ordinal), and ranks to enter every call late.
struct Schedule {
  std::set<std::pair<int, int>> held;
  std::set<int> late;

  bool empty() const { return held.empty() && late.empty(); }
  bool operator==(const Schedule&) const = default;
};

// Finds the data operations that happen before what an operation waits for: the nearest in every
// queue on the way, and some that come before these in their queues.
class ScheduleFinder {
 public:
  explicit ScheduleFinder(const verify::Programs& programs) : programs_(programs) {}

  // Adds what the operation waits for; an operation that does not wait is to be held itself.
  void Add(int rank, size_t index) {
    visited_.clear();
    const Operation& op = at(rank).operations[index];
    if (op.kind == OpKind::kWait) {
      Producer(rank, op);
    } else if (op.kind == OpKind::kAwait) {
      op.event.kind == EventKind::kReady ? AddLate(rank) : Recorder(rank, op.event);
    } else {
      Hold(rank, index);
    }
  }
  void AddLate(int rank) { found_.late.insert(rank); }

  // The nearest together, then one by one, because together they may hold back the fault as well;
  // then the earlier ones, of which a later one may have been what the fault needs.
  std::vector<Schedule> Schedules() const {
    std::vector<Schedule> schedules = {found_};
    if (found_.held.size() + found_.late.size() > 1) {
      for (const auto& held : found_.held) schedules.push_back({{held}, {}});
      for (const int late : found_.late) schedules.push_back({{}, {late}});
    }
    for (const auto& held : earlier_) schedules.push_back({{held}, {}});
    return schedules;
  }

 private:
  static constexpr int kEarlier = 3;  // in a queue

  const Program& at(int rank) const { return *programs_[static_cast<size_t>(rank)]; }
  void Hold(int rank, size_t index) { found_.held.insert({rank, DataOrdinal(at(rank), index)}); }

  // The operation whose increment ends the wait; value 0: the last one, of the call before.
  void Producer(int rank, const Operation& wait) {
    const int producer = wait.counter.producer;
    const auto& operations = at(producer).operations;
    size_t found = operations.size();
    int64_t increments = 0;
    const auto count = [&](size_t i) {
      ++increments;
      if (wait.value <= 0 || increments == wait.value) found = i;
    };
    for (size_t i = 0; i < operations.size(); ++i) {
      const Operation& op = operations[i];
      if (op.peer != rank) continue;
      if (op.kind == OpKind::kSignal && op.counter == wait.counter) count(i);
      for (const PutPiece& put : op.puts) {
        if (put.signal == wait.counter.kind && put.signal_index == wait.counter.index) count(i);
      }
    }
    if (found == operations.size()) return;
    if (operations[found].kind == OpKind::kPut) {
      Hold(producer, found);
    } else {
      Before(producer, found);
    }
  }

  void Recorder(int rank, const Event& event) {
    const auto& operations = at(rank).operations;
    for (size_t i = 0; i < operations.size(); ++i) {
      if (operations[i].kind == OpKind::kRecord && operations[i].event == event) Before(rank, i);
    }
  }

  // What lies before an operation in its queue.
  void Before(int rank, size_t index) {
    if (!visited_.insert({rank, index}).second) return;
    const auto& operations = at(rank).operations;
    for (size_t i = index; i-- > 0;) {
      const Operation& op = operations[i];
      if (op.queue != operations[index].queue) continue;
      if (MovesData(op)) {
        Hold(rank, i);
        Earlier(rank, i);
        return;
      }
      if (op.kind == OpKind::kWait && op.value > 0) Producer(rank, op);
      if (op.kind != OpKind::kAwait) continue;
      if (op.event.kind == EventKind::kReady) {
        found_.late.insert(rank);
      } else {
        Recorder(rank, op.event);
      }
    }
  }

  void Earlier(int rank, size_t index) {
    const auto& operations = at(rank).operations;
    int left = kEarlier;
    for (size_t i = index; i-- > 0 && left > 0;) {
      if (operations[i].queue != operations[index].queue || !MovesData(operations[i])) continue;
      earlier_.insert({rank, DataOrdinal(at(rank), i)});
      --left;
    }
  }

  const verify::Programs& programs_;
  Schedule found_;
  std::set<std::pair<int, int>> earlier_;
  std::set<std::pair<int, size_t>> visited_;
};

// Carries a schedule out. One for each run; its ranks are threads.
class Adversary {
 public:
  using Clock = std::chrono::steady_clock;

  // `quiet`: how long nothing must have moved before something held may go on.
  Adversary(Schedule schedule, int ranks, std::chrono::nanoseconds quiet)
      : schedule_(std::move(schedule)), quiet_(quiet), asked_(static_cast<size_t>(ranks)) {}

  // Lets everything go on.
  void Stop() { stopped_ = true; }

  bool MayRun(const Program& program, const Operation& op) {
    if (stopped_) return true;
    if (MovesData(op)) {
      const auto index = static_cast<size_t>(&op - program.operations.data());
      const int ordinal = DataOrdinal(program, index);
      if (schedule_.held.count({program.rank, ordinal}) > 0 && !Released(program.rank, ordinal)) {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        return false;
      }
    }
    Moved();
    return true;
  }

  void Enter(int rank) {
    while (schedule_.late.count(rank) > 0 && !Released(rank, -1)) {
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
    Moved();
  }

 private:
  void Moved() { moved_.store(Clock::now().time_since_epoch().count()); }

  bool Released(int rank, int ordinal) {
    if (stopped_) return true;
    auto& asked = asked_[static_cast<size_t>(rank)];
    const auto now = Clock::now();
    const auto first = asked.emplace(ordinal, now).first->second;
    const Clock::time_point moved{Clock::duration(moved_.load())};
    if (now - std::max(first, moved) < quiet_) return false;
    asked.erase(ordinal);
    return true;
  }

  const Schedule schedule_;
  const std::chrono::nanoseconds quiet_;
  std::atomic<Clock::rep> moved_ = 0;
  std::atomic<bool> stopped_ = false;
  std::vector<std::map<int, Clock::time_point>> asked_;  // by rank: when a held one first asked
};

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_ADVERSARY_H_
