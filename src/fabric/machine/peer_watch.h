// Notices at once when a peer's process ends or leaves the communicator.
//
// Whoever watches sleeps in poll(2) until something happens: it costs a training step nothing. That
// a peer is gone is no error in itself; it is one for a call that waits for that peer.
#ifndef TIDE_FABRIC_MACHINE_PEER_WATCH_H_
#define TIDE_FABRIC_MACHINE_PEER_WATCH_H_

#include <poll.h>

#include <atomic>
#include <chrono>
#include <vector>

#include "fabric/machine/rendezvous.h"
#include "fabric/machine/shared_memory.h"

namespace tide::machine {

class PeerWatch {
 public:
  // The sockets outlive the watch.
  explicit PeerWatch(const PeerSockets& sockets);

  // From any thread.
  bool Gone(int peer) const {
    return gone_[static_cast<size_t>(peer)].load(std::memory_order_acquire);
  }
  // Sleeps until a peer has gone or `limit` has passed, 0 for no limit. False once Stop was called.
  // One thread.
  bool Sleep(std::chrono::milliseconds limit);
  void Stop();

 private:
  std::vector<std::atomic<bool>> gone_;
  std::vector<FileDescriptor> processes_;
  FileDescriptor stop_;
  std::vector<pollfd> items_;  // of each neighbour its socket and its process, then the stop
  std::vector<int> owners_;    // by item, the stop excepted
};

}  // namespace tide::machine

#endif  // TIDE_FABRIC_MACHINE_PEER_WATCH_H_
