// The other ranks of this machine, as the host sees them: what they have enqueued, whether they are
// still there, and what they said last.
//
// Every rank has a page that the others read. What a call costs is a few stores into it; everything
// else happens on the watchdog's thread. Ranks of other machines, or of containers that share
// neither sockets nor memory with this one, have no page here: whatever befalls them is told at the
// deadline, by their own watchdogs.
#ifndef TIDE_FABRIC_NCCL_PEERS_H_
#define TIDE_FABRIC_NCCL_PEERS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/machine/call_ring.h"
#include "fabric/machine/last_words.h"
#include "fabric/machine/peer_watch.h"
#include "fabric/machine/rendezvous.h"
#include "fabric/machine/shared_memory.h"
#include "tide/bootstrap.h"

namespace tide::nccl {

// How far the host of one rank may run ahead of another's and still be compared: more than the
// calls of a training step of a large model. Both compare later if it is further.
inline constexpr int kComparedCalls = 512;

// Lies in zeroed shared memory.
struct PeerPage {
  machine::CallRing<kComparedCalls> calls;
  machine::LastWords last_words;
};

class Peers {
 public:
  // Collective. That a rank can't be looked after is no error: see unwatched_reason.
  Peers(Bootstrap& bootstrap, const Topology& topology, std::chrono::nanoseconds timeout);

  // Why some ranks are not looked after; empty if all are.
  const std::string& unwatched_reason() const { return unwatched_reason_; }

  // One thread. The call's layout lives until StopComparing or the end of this object.
  void Publish(const Call& call);
  // From any thread: a call may fail while the watchdog gives up. The first words stay.
  void LeaveWords(const Error& error);
  // From any thread. Nobody looks at layouts any more when it returns.
  void StopComparing();

  // Below: the watchdog's thread, Stop excepted.

  // Sleeps until a peer has gone or `limit` has passed; false once Stop was called.
  bool Sleep(std::chrono::milliseconds limit) { return watch_->Sleep(limit); }
  void Stop() { watch_->Stop(); }
  // Whether the rank is looked after and its process has ended, or has left the communicator.
  bool Gone(int peer) const { return page(peer) != nullptr && peer != rank_ && watch_->Gone(peer); }
  // The newest call that the rank has enqueued, 0 if there is none.
  uint64_t LastCall(int peer) const { return page(peer)->calls.last(); }
  // Compares what has been enqueued since. Tells the first difference once and then no more.
  std::optional<std::string> FindMismatch();
  // "rank 1 ended: ..." of a rank that is gone.
  std::string DescribeEnd(int peer) const;
  // What every rank that is looked after enqueued last, a line each.
  std::string DescribePositions() const;

 private:
  // Null if the rank is not looked after.
  PeerPage* page(int rank) const { return pages_[static_cast<size_t>(rank)]; }
  // Returns what went wrong on this rank, empty for nothing.
  std::string SharePages();
  std::string DescribeMismatch(int peer, uint64_t differs) const;

  const int rank_;
  machine::PeerSockets sockets_;
  std::vector<machine::Mapping> mappings_;
  std::vector<PeerPage*> pages_;
  std::unique_ptr<machine::PeerWatch> watch_;
  std::string unwatched_reason_;
  std::array<std::atomic<const GroupLayout*>, kComparedCalls> layouts_{};  // as in the own ring

  std::mutex words_mutex_;

  std::mutex comparing_mutex_;
  bool comparing_ = true;
  std::vector<uint64_t> equal_up_to_;  // by peer: calls that have been compared
};

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_PEERS_H_
