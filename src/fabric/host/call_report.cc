#include "fabric/host/call_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace tide::host {
namespace {

std::string GroupName(const Call& call) {
  return call.layout != nullptr ? call.layout->name() : std::string();
}

bool TakesPart(const CallIdentity& call, int param) {
  return (call.takes_part[param / 64] >> (param % 64) & 1) != 0;
}

// "'weight', 'bias'": the parameters that `has` hands in and `lacks` does not.
std::string OnlyIn(const GroupLayout& layout, const CallIdentity& has, const CallIdentity& lacks) {
  std::string names;
  const int count =
      std::min({has.params, lacks.params, kNamedParams, static_cast<int>(layout.params().size())});
  for (int p = 0; p < count; ++p) {
    if (!TakesPart(has, p) || TakesPart(lacks, p)) continue;
    if (!names.empty()) names += ", ";
    names += "'" + layout.params()[static_cast<size_t>(p)].shape.name + "'";
  }
  return names;
}

ErrorContext Context(const Call& call, int rank, int peer) {
  return {rank, peer, GroupName(call), call.program->name};
}

}  // namespace

Error MismatchError(const Call& call, int rank, int peer, const CallIdentity& theirs) {
  const CallIdentity& ours = call.identity;
  // Lower rank first, so that both ranks say the same sentence.
  const bool first = rank < peer;
  const CallIdentity& a = first ? ours : theirs;
  const CallIdentity& b = first ? theirs : ours;
  const int rank_a = std::min(rank, peer);
  const int rank_b = std::max(rank, peer);
  std::string text = fmt::format("call {}: rank {} entered {}, rank {} entered {}", ours.sequence,
                                 rank_a, a.text, rank_b, b.text);
  if (call.layout != nullptr && ours.group == theirs.group) {
    const std::string only_a = OnlyIn(*call.layout, a, b);
    const std::string only_b = OnlyIn(*call.layout, b, a);
    if (!only_a.empty()) text += fmt::format("; only rank {} has a gradient of {}", rank_a, only_a);
    if (!only_b.empty()) text += fmt::format("; only rank {} has a gradient of {}", rank_b, only_b);
    if (!only_a.empty() || !only_b.empty()) {
      text +=
          "; expected the same parameters on every rank: use every parameter on every rank or call "
          "set_reduce_scatter_unused_params(True) on the module";
    } else {
      text += "; their dtypes, landing or output differ";
    }
  } else {
    text += "; expected the same calls in the same order on every rank";
  }
  return {ErrorCode::kMismatch, text + ". No data was exchanged.", Context(call, rank, peer)};
}

Error PeerGoneError(const Call& call, int rank, const Operation& blocked) {
  const int peer = blocked.counter.producer;
  return {ErrorCode::kPeerDead,
          fmt::format("rank {} has exited; rank {} waited for its '{}' signal in call {}, {}. See "
                      "rank {}'s own "
                      "output for the cause and restart the job.",
                      peer, rank, Name(blocked.counter.kind), call.identity.sequence,
                      call.identity.text, peer),
          Context(call, rank, peer)};
}

Error TimeoutError(const Call& call, int rank, const Operation& blocked, int culprit,
                   const ControlPage& page, double seconds) {
  const int peer = blocked.counter.producer;
  std::string theirs;
  if (culprit != peer) theirs = fmt::format("rank {} waits for rank {}; ", peer, culprit);
  const uint64_t last =
      page.valid() ? page.header().last_sequence.load(std::memory_order_acquire) : 0;
  if (last > 0) {
    theirs += fmt::format("rank {} last entered call {}, {}. ", culprit, last,
                          page.PublishedCall(last).text);
  } else if (page.valid()) {
    theirs += fmt::format("rank {} has not entered any call. ", culprit);
  }
  return {ErrorCode::kTimeout,
          fmt::format("rank {} waited {:.1f} s for rank {}'s '{}' signal in call {}, {}; {}Find out "
                      "what keeps rank {}, or raise timeout= (TIDE_TIMEOUT).",
                      rank, seconds, peer, Name(blocked.counter.kind), call.identity.sequence,
                      call.identity.text, theirs, culprit),
          Context(call, rank, culprit)};
}

}  // namespace tide::host
