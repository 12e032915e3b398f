#include "verify/memory.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace tide::verify {

void Append(const Portion& portion, std::vector<Portion>* portions) {
  const bool joins =
      !portions->empty() && portion.value.Continues(portions->back().value, portions->back().bytes);
  if (joins) {
    portions->back().bytes += portion.bytes;
  } else {
    portions->push_back(portion);
  }
}

Memory::Memory(int id, History* history) : id_(id), history_(*history) {
  segments_[0].value = Uniform(kStaleExpr);
}

int64_t Memory::End(Segments::const_iterator it) const {
  const auto next = std::next(it);
  return next == segments_.end() ? std::numeric_limits<int64_t>::max() : next->first;
}

Memory::Segments::iterator Memory::SplitAt(int64_t at) {
  auto next = segments_.upper_bound(at);
  const auto it = std::prev(next);
  if (it->first == at) return it;
  Segment tail = it->second;
  tail.value = it->second.value.After(at - it->first);
  return segments_.emplace_hint(next, at, std::move(tail));
}

void Memory::Check(Epoch earlier, bool earlier_writes, const Actor& actor, bool writes,
                   int64_t begin, int64_t end) {
  if (earlier.none()) return;
  ++history_.pairs;
  if (history_.clocks.Before(earlier, actor)) return;
  history_.report({id_, earlier, earlier_writes, actor.epoch, writes, begin, end});
}

void Memory::CheckPredecessors(const Actor& actor, bool writes, int64_t begin, int64_t end) {
  for (const Epoch epoch : predecessor_writes_) Check(epoch, true, actor, writes, begin, end);
  if (!writes) return;
  for (const Epoch epoch : predecessor_reads_) Check(epoch, false, actor, writes, begin, end);
}

void Memory::Remember(const Actor& actor, std::vector<Epoch>* epochs) const {
  if (!epochs->empty() && epochs->back() == actor.epoch) return;
  std::erase_if(*epochs, [&](Epoch old) { return history_.clocks.Before(old, actor); });
  epochs->push_back(actor.epoch);
}

void Memory::Read(int64_t begin, int64_t end, const Actor& actor, std::vector<Portion>* portions) {
  if (begin >= end) return;
  ++history_.accesses;
  CheckPredecessors(actor, false, begin, end);
  const auto stop = SplitAt(end);
  for (auto it = SplitAt(begin); it != stop; ++it) {
    const int64_t until = End(it);
    Check(it->second.write, true, actor, false, it->first, until);
    Remember(actor, &it->second.reads);
    portions->push_back({until - it->first, it->second.value});
  }
}

void Memory::Peek(int64_t begin, int64_t end, std::vector<Portion>* portions) const {
  auto it = std::prev(segments_.upper_bound(begin));
  while (begin < end) {
    const int64_t until = std::min(end, End(it));
    portions->push_back({until - begin, it->second.value.After(begin - it->first)});
    begin = until;
    ++it;
  }
}

void Memory::Write(int64_t begin, int64_t end, const Actor& actor,
                   const std::vector<Portion>& portions) {
  if (begin >= end) return;
  ++history_.accesses;
  CheckPredecessors(actor, true, begin, end);
  const auto stop = SplitAt(end);
  auto it = SplitAt(begin);
  for (auto old = it; old != stop; ++old) {
    const int64_t until = End(old);
    Check(old->second.write, true, actor, true, old->first, until);
    for (const Epoch read : old->second.reads) {
      Check(read, false, actor, true, old->first, until);
    }
  }
  segments_.erase(std::next(it), stop);
  bool first = true;
  for (const Portion& portion : portions) {
    if (portion.bytes == 0) continue;
    if (!first) it = segments_.emplace_hint(stop, begin, Segment());
    first = false;
    it->second = {actor.epoch, portion.value, {}};
    begin += portion.bytes;
    if (it == segments_.begin()) continue;
    const auto left = std::prev(it);
    if (left->second.write == actor.epoch && left->second.reads.empty() &&
        portion.value.Continues(left->second.value, it->first - left->first)) {
      segments_.erase(it);
    }
  }
}

void Memory::TouchAll(const Actor& actor, bool writes) {
  for (auto it = segments_.begin(); it != segments_.end(); ++it) {
    const int64_t until = End(it);
    Check(it->second.write, true, actor, writes, it->first, until);
    if (!writes) continue;
    for (const Epoch read : it->second.reads) Check(read, false, actor, true, it->first, until);
  }
  Remember(actor, writes ? &predecessor_writes_ : &predecessor_reads_);
}

}  // namespace tide::verify
