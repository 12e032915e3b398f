// Notices at once when a peer's process ends or leaves the communicator.
//
// One thread, asleep in poll(2) until something happens: it costs a training step nothing. It only
// marks the peer and rings the own doorbell; the waiting call raises the error, and only if it
// waits for that peer.
#ifndef TIDE_FABRIC_HOST_WATCHDOG_H_
#define TIDE_FABRIC_HOST_WATCHDOG_H_

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "fabric/host/control_page.h"
#include "fabric/host/rendezvous.h"

namespace tide::host {

class Watchdog {
 public:
  // Both outlive the watchdog.
  Watchdog(const PeerSockets& sockets, const ControlPage& own);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  bool Gone(int peer) const {
    return gone_[static_cast<size_t>(peer)].load(std::memory_order_acquire);
  }

 private:
  void Watch();

  const ControlPage own_;
  std::vector<std::atomic<bool>> gone_;
  std::vector<FileDescriptor> processes_;
  std::vector<int> sockets_;
  FileDescriptor stop_;
  std::thread thread_;
};

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_WATCHDOG_H_
