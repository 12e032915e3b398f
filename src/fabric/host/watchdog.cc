#include "fabric/host/watchdog.h"

#include <csignal>

namespace tide::host {

Watchdog::Watchdog(const machine::PeerSockets& sockets, const ControlPage& own)
    : own_(own), peers_(sockets) {
  thread_ = std::thread([this] { Watch(); });
}

Watchdog::~Watchdog() {
  peers_.Stop();
  thread_.join();
}

void Watchdog::Watch() {
  // Signals belong to the caller's threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  while (peers_.Sleep({})) own_.Ring();
}

}  // namespace tide::host
