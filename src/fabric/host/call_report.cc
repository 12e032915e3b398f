#include "fabric/host/call_report.h"

#include <fmt/format.h>

#include "fabric/machine/mismatch.h"

namespace tide::host {
namespace {

std::string GroupName(const Call& call) {
  return call.layout != nullptr ? call.layout->name() : std::string();
}

ErrorContext Context(const Call& call, int rank, int peer) {
  return {rank, peer, GroupName(call), call.program->name};
}

}  // namespace

Error MismatchError(const Call& call, int rank, int peer, const CallIdentity& theirs) {
  return {ErrorCode::kMismatch,
          machine::DescribeMismatch(call.identity, rank, theirs, peer, call.layout) +
              ". Nothing that was sent is used.",
          Context(call, rank, peer)};
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
  const uint64_t last = page.valid() ? page.header().calls.last() : 0;
  if (last > 0) {
    theirs += fmt::format("rank {} last entered call {}, {}. ", culprit, last,
                          page.header().calls.Peek(last).text);
  } else if (page.valid()) {
    theirs += fmt::format("rank {} has not entered any call. ", culprit);
  }
  return {ErrorCode::kTimeout,
          fmt::format("rank {} waits for rank {}'s '{}' signal in call {}, {}, which has taken its "
                      "{:.1f} s; {}Find out what keeps rank {}, or raise timeout= (TIDE_TIMEOUT).",
                      rank, peer, Name(blocked.counter.kind), call.identity.sequence,
                      call.identity.text, seconds, theirs, culprit),
          Context(call, rank, culprit)};
}

}  // namespace tide::host
