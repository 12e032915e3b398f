// The thread that watches the peers. It only rings the own doorbell; the waiting call raises the
// error, and only if it waits for the peer that is gone.
#ifndef TIDE_FABRIC_HOST_WATCHDOG_H_
#define TIDE_FABRIC_HOST_WATCHDOG_H_

#include <thread>

#include "fabric/host/control_page.h"
#include "fabric/machine/peer_watch.h"

namespace tide::host {

class Watchdog {
 public:
  // Both outlive the watchdog.
  Watchdog(const machine::PeerSockets& sockets, const ControlPage& own);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  bool Gone(int peer) const { return peers_.Gone(peer); }

 private:
  void Watch();

  const ControlPage own_;
  machine::PeerWatch peers_;
  std::thread thread_;
};

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_WATCHDOG_H_
