// Happens-before and dataflow over one simulated schedule, with all pacing removed.
#ifndef TIDE_VERIFY_CHECKER_H_
#define TIDE_VERIFY_CHECKER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "verify/clocks.h"
#include "verify/dataflow.h"
#include "verify/findings.h"
#include "verify/memory.h"
#include "verify/model.h"
#include "verify/simulate.h"

namespace tide::verify {

class Checker {
 public:
  Checker(const Model& model, Findings* findings, Relaxed relaxed = {});
  // Returns the steps at which queues stay blocked.
  std::vector<int> Run(const std::function<void()>& check_interrupt);
  // The step by which the relaxed step's queue knew all that the relaxed step would have told it,
  // if that was before the queue did anything but wait; else null.
  const Step* substitute() const { return !used_ || in_time_ ? substitute_ : nullptr; }

 private:
  struct Increment {
    Stamp stamp;
    uint32_t piece = kNone;
    const Step* step = nullptr;
  };
  // Increments of one counter in the order in which they are issued. Those of one wire arrive in
  // that order; signals count as a wire of their own.
  struct CounterLog {
    std::deque<Increment> pending;  // that no wait covers yet
    std::vector<uint32_t> wires;    // of all increments
    bool several_wires = false;
    int64_t covered = 0;
    std::vector<std::pair<const Step*, int64_t>> waits;  // with growing targets
  };
  struct EventLog {
    std::optional<Stamp> stamp;
    int waits_left = 0;
  };

  // Executes a step and follows the queue of the relaxed one.
  void Follow(const Step& step);
  void Execute(const Step& step);
  void Put(const Step& step);
  void Produce(int counter, Increment increment, uint32_t wire);
  void Wait(const Step& step);
  // How many increments were surely there when this one was issued.
  static int64_t KnownBefore(const CounterLog& log, const Stamp& stamp);
  // Whether the increment can arrive before those in [from, to).
  static bool CanOvertake(const CounterLog& log, uint32_t wire, int64_t from, int64_t to);
  // Whether the relaxed step's queue knows all that the step would have told it.
  bool KnowsRelaxed() const;
  bool KnowsStamp(const Stamp& stamp) const;
  void ReportAmbiguous(const Step& wait, const Step& producer);
  void ReportRace(const Conflict& conflict);
  const Step& StepOf(Epoch epoch) const;

  const Model& model_;
  Findings& findings_;
  const Relaxed relaxed_;
  const Step* substitute_ = nullptr;
  bool passed_ = false;  // the relaxed step
  bool in_time_ = false;
  bool used_ = false;
  Clocks clocks_;
  History history_;
  Dataflow dataflow_;
  std::vector<CounterLog> counters_;
  std::vector<EventLog> events_;
  std::set<std::pair<const Step*, const Step*>> reported_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_CHECKER_H_
