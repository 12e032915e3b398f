#include "fabric/host/watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>

namespace tide::host {

Watchdog::Watchdog(const PeerSockets& sockets, const ControlPage& own)
    : own_(own), gone_(static_cast<size_t>(sockets.world())), stop_(eventfd(0, EFD_CLOEXEC)) {
  for (int peer = 0; peer < sockets.world(); ++peer) {
    sockets_.push_back(sockets.socket(peer));
    // The socket tells of a leaving thread or process; the process descriptor also where a forked
    // child of the peer keeps the socket open.
    processes_.push_back(sockets.IsNeighbour(peer) ? sockets.OpenProcess(peer) : FileDescriptor());
  }
  thread_ = std::thread([this] { Watch(); });
}

Watchdog::~Watchdog() {
  const uint64_t one = 1;
  if (write(stop_.get(), &one, sizeof one) == sizeof one) thread_.join();
}

void Watchdog::Watch() {
  // Signals belong to the caller's threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  const size_t peers = sockets_.size();
  // poll ignores negative descriptors.
  std::vector<pollfd> items(2 * peers + 1);
  for (size_t peer = 0; peer < peers; ++peer) {
    items[2 * peer] = {sockets_[peer], POLLRDHUP, 0};
    items[2 * peer + 1] = {processes_[peer].get(), POLLIN, 0};
  }
  items.back() = {stop_.get(), POLLIN, 0};
  while (true) {
    if (poll(items.data(), items.size(), -1) < 0) continue;
    if (items.back().revents != 0) return;
    for (size_t i = 0; i + 1 < items.size(); ++i) {
      if (items[i].revents == 0) continue;
      items[i].fd = -1;
      gone_[i / 2].store(true, std::memory_order_release);
      own_.Ring();
    }
  }
}

}  // namespace tide::host
