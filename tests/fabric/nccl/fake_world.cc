#include "fabric/nccl/fake_world.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "tide/error.h"

namespace tide::testing {
namespace {

constexpr int kPartsAtATime = 16;
// Both are drawn as powers of two.
constexpr unsigned kBurstBits = 6;   // parts that a queue goes on for
constexpr unsigned kSpellBits = 13;  // steps that a queue is held back for
// One in so many choices holds a queue back.
constexpr unsigned kSpellChance = 4;

}  // namespace

FakeWorld::FakeWorld(int ranks, unsigned seed, Order order)
    : ranks_(ranks),
      order_(order),
      most_queues_(order == Order::kOneQueue ? 1 : std::numeric_limits<size_t>::max()),
      random_(seed),
      queues_(static_cast<size_t>(ranks)),
      calls_(static_cast<size_t>(ranks)),
      traits_(static_cast<size_t>(ranks)),
      memory_(static_cast<size_t>(ranks), int64_t{1} << 40) {}

FakeWorld::Queue* FakeWorld::AddStream(int rank) {
  const std::lock_guard lock(mutex_);
  auto& queues = queues_[static_cast<size_t>(rank)];
  if (queues.size() < most_queues_) {
    queues.push_back(std::make_unique<Queue>());
    queues.back()->rank = rank;
    queues.back()->streams = 1;
    return queues.back().get();
  }
  const auto emptiest =
      std::min_element(queues.begin(), queues.end(),
                       [](const auto& a, const auto& b) { return a->streams < b->streams; });
  ++(*emptiest)->streams;
  return emptiest->get();
}

void FakeWorld::EndStream(Queue* queue) {
  const std::lock_guard lock(mutex_);
  --queue->streams;
}

void FakeWorld::Append(Queue* queue, Operation operation) {
  const std::lock_guard lock(mutex_);
  if (turn_ != Turn::kNobody) queue->operations.push_back(std::move(operation));
}

bool FakeWorld::CanRun(const Queue& queue) const {
  if (queue.operations.empty() || queue.rank == frozen_rank_) return false;
  const Operation& head = queue.operations.front();
  return !head.pause && (queue.started || !head.runnable || head.runnable());
}

FakeWorld::Queue* FakeWorld::Choose() {
  able_.clear();
  held_.clear();
  size_t count = 0;
  for (const auto& queues : queues_) {
    count += queues.size();
    for (const auto& queue : queues) {
      if (CanRun(*queue)) (queue->held_until > steps_ ? held_ : able_).push_back(queue.get());
    }
  }
  if (able_.empty()) able_.swap(held_);
  if (able_.empty()) return nullptr;
  Queue* chosen = able_[random_() % able_.size()];
  chosen->held_until = 0;
  burst_ = uint64_t{1} << random_() % (kBurstBits + 1);
  if (random_() % kSpellChance == 0) {
    size_t number = random_() % count;
    size_t rank = 0;
    while (number >= queues_[rank].size()) number -= queues_[rank++].size();
    queues_[rank][number]->held_until = steps_ + (uint64_t{1} << random_() % (kSpellBits + 1));
  }
  return chosen;
}

void FakeWorld::RunPart(Queue* queue) {
  Operation& head = queue->operations.front();
  if (!queue->started) {
    queue->started = true;
    queue->one_by_one = random_() % 2 == 0;
    queue->line = head.lines.size();
  }
  if (!head.lines.empty()) {
    const bool goes_on = queue->one_by_one && queue->line < head.lines.size();
    const size_t line = goes_on ? queue->line : random_() % head.lines.size();
    queue->line = line;
    head.lines[line].front()();
    head.lines[line].pop_front();
    if (head.lines[line].empty()) {
      std::swap(head.lines[line], head.lines.back());
      head.lines.pop_back();
      queue->line = head.lines.size();
    }
  }
  if (head.lines.size() == 1 && random_() % 2 == 0) {
    // One line stays behind until nothing else can move: a transfer of a group, the copy to a peer.
    queue->held_until = std::numeric_limits<uint64_t>::max();
    burst_ = 0;
  }
  if (!head.lines.empty()) return;
  if (head.end) head.end();
  queue->operations.pop_front();
  queue->started = false;
}

bool FakeWorld::StepLocked() {
  ++steps_;
  if (burst_ == 0 || current_ == nullptr || !CanRun(*current_)) current_ = Choose();
  if (current_ == nullptr) return false;
  if (burst_ > 0) --burst_;
  RunPart(current_);
  return true;
}

bool FakeWorld::ResumeLocked() {
  able_.clear();
  for (const auto& queues : queues_) {
    for (const auto& queue : queues) {
      const bool paused = !queue->operations.empty() && queue->operations.front().pause;
      if (paused && queue->rank != frozen_rank_) able_.push_back(queue.get());
    }
  }
  if (able_.empty()) return false;
  able_[random_() % able_.size()]->operations.pop_front();
  return true;
}

bool FakeWorld::Step() {
  const std::lock_guard lock(mutex_);
  return StepLocked();
}

bool FakeWorld::Resume() {
  const std::lock_guard lock(mutex_);
  return ResumeLocked();
}

bool FakeWorld::Reached(const bool& flag) {
  const std::lock_guard lock(mutex_);
  for (int i = 0; turn_ == Turn::kEverybody && i < kPartsAtATime && !flag; ++i) {
    if (!StepLocked() && !ResumeLocked()) break;
  }
  return flag || turn_ == Turn::kNobody;
}

void FakeWorld::Drive(unsigned seed) {
  const std::lock_guard lock(mutex_);
  // What threads have begun ends here; the rest depends on the seed alone.
  while (StepLocked() || ResumeLocked()) {
  }
  turn_ = Turn::kDriver;
  random_.seed(seed);
  for (const auto& queues : queues_) {
    for (const auto& queue : queues) queue->held_until = 0;
  }
  steps_ = 0;
  burst_ = 0;
  current_ = nullptr;
}

void FakeWorld::EndDrive() {
  const std::lock_guard lock(mutex_);
  turn_ = Turn::kEverybody;
}

bool FakeWorld::Idle() {
  const std::lock_guard lock(mutex_);
  for (const auto& queues : queues_) {
    for (const auto& queue : queues) {
      if (!queue->operations.empty()) return false;
    }
  }
  return true;
}

void FakeWorld::NoteEnd(int rank) {
  const std::lock_guard lock(mutex_);
  while (turn_ == Turn::kEverybody && (StepLocked() || ResumeLocked())) {
  }
  for (const auto& queue : queues_[static_cast<size_t>(rank)]) {
    ended_busy_ = ended_busy_ || !queue->operations.empty();
  }
}

void FakeWorld::Abandon() {
  const std::lock_guard lock(mutex_);
  turn_ = Turn::kNobody;
  for (const auto& queues : queues_) {
    for (const auto& queue : queues) {
      queue->operations.clear();
      queue->started = false;
    }
  }
}

std::map<int, std::shared_ptr<void>> FakeWorld::Meet(const std::string& name, int members, int key,
                                                     std::shared_ptr<void> value) {
  constexpr std::chrono::seconds kMeetLimit{60};
  std::unique_lock lock(mutex_);
  Meeting& meeting = meetings_[name];
  meeting.values[key] = std::move(value);
  met_.notify_all();
  const bool met = met_.wait_for(
      lock, kMeetLimit, [&] { return static_cast<int>(meeting.values.size()) == members; });
  if (!met) throw Error(ErrorCode::kTimeout, name + ": a rank is missing");
  return meeting.values;
}

}  // namespace tide::testing
