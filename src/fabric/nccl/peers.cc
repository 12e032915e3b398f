#include "fabric/nccl/peers.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "fabric/machine/mismatch.h"
#include "fabric/nccl/agreement.h"
#include "tide/error.h"

namespace tide::nccl {
namespace {

int64_t PageBytes() { return AlignUp(sizeof(PeerPage), machine::PageBytes()); }

}  // namespace

Peers::Peers(Bootstrap& bootstrap, const Topology& topology, std::chrono::nanoseconds timeout)
    : rank_(bootstrap.rank()),
      sockets_(bootstrap, topology, timeout, machine::Reach::kMachine),
      mappings_(static_cast<size_t>(bootstrap.world())),
      pages_(static_cast<size_t>(bootstrap.world())),
      equal_up_to_(static_cast<size_t>(bootstrap.world())) {
  const std::string trouble = SharePages();
  // A rank in trouble looks after nobody, and nobody looks after it.
  const std::vector<std::string> troubles = bootstrap.AllGather(trouble);
  int unreached = 0;
  for (int peer = 0; peer < bootstrap.world(); ++peer) {
    const std::string& theirs = troubles[static_cast<size_t>(peer)];
    if (theirs.empty() && trouble.empty() && page(peer) != nullptr) continue;
    if (peer != rank_) pages_[static_cast<size_t>(peer)] = nullptr;
    if (theirs.empty() && trouble.empty()) ++unreached;
    if (!theirs.empty() && unwatched_reason_.empty()) {
      unwatched_reason_ = fmt::format("rank {}: {}", peer, theirs);
    }
  }
  if (unreached > 0) {
    if (!unwatched_reason_.empty()) unwatched_reason_ += "; ";
    unwatched_reason_ += fmt::format(
        "{} of {} ranks are on other machines, or in containers that share no memory "
        "with rank {}",
        unreached, bootstrap.world(), rank_);
  }
  TakeStep(bootstrap, "looking after the ranks", "",
           [&] { watch_ = std::make_unique<machine::PeerWatch>(sockets_); });
}

std::string Peers::SharePages() {
  const std::string label = "call page";
  const auto self = static_cast<size_t>(rank_);
  machine::FileDescriptor memory;
  std::string trouble;
  try {
    memory = machine::CreateMemory(PageBytes(), label);
    mappings_[self] = machine::Mapping(memory.get(), PageBytes(), machine::MapKind::kShared);
  } catch (const Error& error) {
    trouble = error.what();
    memory.Reset();
  }
  try {
    machine::Notice mine;
    mine.bytes = PageBytes();
    mine.SetText(label);
    const auto received = sockets_.Exchange(mine, memory.get(), "sharing " + label);
    for (size_t peer = 0; peer < received.size(); ++peer) {
      const machine::FileDescriptor& theirs = received[peer].memory;
      if (!theirs.valid()) continue;
      mappings_[peer] = machine::Mapping(theirs.get(), PageBytes(), machine::MapKind::kShared);
    }
  } catch (const Error& error) {
    if (trouble.empty()) trouble = error.what();
  }
  for (size_t rank = 0; rank < pages_.size(); ++rank) {
    char* page = mappings_[rank].data();
    if (page != nullptr) pages_[rank] = reinterpret_cast<PeerPage*>(page);
  }
  return trouble;
}

void Peers::Publish(const Call& call) {
  PeerPage* own = page(rank_);
  if (own == nullptr) return;
  // Before the call is published: whoever reads its number sees this, too.
  layouts_[call.identity.sequence % kComparedCalls].store(call.layout, std::memory_order_relaxed);
  own->calls.Publish(call.identity);
}

void Peers::LeaveWords(const Error& error) {
  const std::lock_guard lock(words_mutex_);
  if (PeerPage* own = page(rank_)) own->last_words.Leave(error);
}

void Peers::StopComparing() {
  const std::lock_guard lock(comparing_mutex_);
  comparing_ = false;
}

std::optional<std::string> Peers::FindMismatch() {
  const std::lock_guard lock(comparing_mutex_);
  const PeerPage* own = page(rank_);
  if (own == nullptr || !comparing_) return std::nullopt;
  for (int peer = 0; peer < static_cast<int>(pages_.size()); ++peer) {
    if (peer == rank_ || page(peer) == nullptr) continue;
    uint64_t& equal = equal_up_to_[static_cast<size_t>(peer)];
    const uint64_t common = std::min(LastCall(rank_), LastCall(peer));
    if (common == equal) continue;
    const auto ours = own->calls.Read(common);
    const auto theirs = page(peer)->calls.Read(common);
    // Too far apart now; the one behind will come to calls that both know.
    if (!ours || !theirs) continue;
    if (ours->history != theirs->history) {
      comparing_ = false;
      return DescribeMismatch(peer, common);
    }
    equal = common;
  }
  return std::nullopt;
}

// The two agree up to what has been compared and differ at call `differs`: finds the first
// difference that both still know.
std::string Peers::DescribeMismatch(int peer, uint64_t differs) const {
  const uint64_t equal = equal_up_to_[static_cast<size_t>(peer)];
  uint64_t last_equal = equal;
  for (uint64_t at = std::max(equal + 1, differs - std::min<uint64_t>(differs, kComparedCalls));
       at <= differs; ++at) {
    const auto ours = page(rank_)->calls.Read(at);
    const auto theirs = page(peer)->calls.Read(at);
    if (!ours || !theirs) continue;
    if (ours->history == theirs->history) {
      last_equal = at;
      continue;
    }
    const GroupLayout* layout = layouts_[at % kComparedCalls].load(std::memory_order_relaxed);
    std::string text =
        machine::DescribeMismatch(ours->identity, rank_, theirs->identity, peer, layout);
    if (last_equal + 1 == at) return text;
    return fmt::format("some call after {} differed first, no longer known; {}", last_equal, text);
  }
  return fmt::format("rank {} and rank {} differ since some call after {}, no longer known",
                     std::min(rank_, peer), std::max(rank_, peer), last_equal);
}

std::string Peers::DescribeEnd(int peer) const {
  const machine::LastWords& words = page(peer)->last_words;
  if (words.left()) return fmt::format("rank {} ended: {}", peer, words.Take(peer, rank_).what());
  return fmt::format("rank {} has ended without a word: it was killed, crashed, or left early",
                     peer);
}

std::string Peers::DescribePositions() const {
  std::string text;
  for (int rank = 0; rank < static_cast<int>(pages_.size()); ++rank) {
    if (page(rank) == nullptr) continue;
    text += rank == rank_ ? "  this rank" : fmt::format("  rank {}", rank);
    if (Gone(rank)) text += ", which has ended,";
    const uint64_t last = LastCall(rank);
    if (last == 0) {
      text += " has enqueued no call\n";
      continue;
    }
    text += fmt::format(" last enqueued call {}", last);
    const auto call = page(rank)->calls.Read(last);
    text += call ? fmt::format(", {}\n", call->identity.text) : "\n";
  }
  if (!unwatched_reason_.empty()) text += fmt::format("  not known: {}\n", unwatched_reason_);
  return text;
}

}  // namespace tide::nccl
