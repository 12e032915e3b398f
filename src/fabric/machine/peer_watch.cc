#include "fabric/machine/peer_watch.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "tide/error.h"

namespace tide::machine {

PeerWatch::PeerWatch(const PeerSockets& sockets)
    : gone_(static_cast<size_t>(sockets.world())), stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!stop_.valid()) internal::ThrowErrno("creating an event descriptor");
  for (int peer = 0; peer < sockets.world(); ++peer) {
    if (!sockets.IsNeighbour(peer)) continue;
    // The socket tells of a leaving thread or process; the process descriptor also where a forked
    // child of the peer keeps the socket open.
    processes_.push_back(sockets.OpenProcess(peer));
    // poll ignores negative descriptors.
    items_.push_back({sockets.socket(peer), POLLRDHUP, 0});
    items_.push_back({processes_.back().get(), POLLIN, 0});
    owners_.insert(owners_.end(), 2, peer);
  }
  items_.push_back({stop_.get(), POLLIN, 0});
}

bool PeerWatch::Sleep(std::chrono::milliseconds limit) {
  const int limit_ms = limit.count() > 0 ? static_cast<int>(limit.count()) : -1;
  if (poll(items_.data(), items_.size(), limit_ms) <= 0) return true;
  if (items_.back().revents != 0) return false;
  for (size_t i = 0; i < owners_.size(); ++i) {
    if (items_[i].revents == 0) continue;
    items_[i].fd = -1;
    gone_[static_cast<size_t>(owners_[i])].store(true, std::memory_order_release);
  }
  return true;
}

void PeerWatch::Stop() {
  const uint64_t one = 1;
  TIDE_CHECK(write(stop_.get(), &one, sizeof one) == sizeof one);
}

}  // namespace tide::machine
