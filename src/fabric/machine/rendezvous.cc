#include "fabric/machine/rendezvous.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tide/error.h"

namespace tide::machine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSocketType = SOCK_SEQPACKET | SOCK_CLOEXEC;

std::string RandomName() {
  unsigned char bits[16];
  if (getrandom(bits, sizeof bits, 0) != sizeof bits) internal::ThrowErrno("reading random bytes");
  std::string name = "tide-";
  for (const unsigned char byte : bits) name += fmt::format("{:02x}", byte);
  return name;
}

// Abstract: the name starts with a zero byte.
socklen_t Address(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  TIDE_CHECK(name.size() + 1 <= sizeof address->sun_path);
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Invalid if there can be none.
FileDescriptor Listen(const std::string& name, int backlog) {
  FileDescriptor fd(::socket(AF_UNIX, kSocketType, 0));
  sockaddr_un address;
  const socklen_t length = Address(name, &address);
  if (!fd.valid() || bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(fd.get(), backlog) != 0) {
    return {};
  }
  return fd;
}

// False when the deadline has passed.
bool WaitFor(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd item{fd, events, 0};
    const int ready =
        poll(&item, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30)));
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) internal::ThrowErrno("waiting on a Unix socket");
  }
}

void SetNotice(const Error& error, int rank, Notice* notice) {
  notice->error_code = static_cast<int32_t>(error.code());
  notice->rank = rank;
  notice->SetText(error.what());
}

// The error of the lowest rank, this one's included.
Notice FirstError(const std::vector<ReceivedNotice>& received, Notice first) {
  for (const ReceivedNotice& entry : received) {
    const Notice& notice = entry.notice;
    if (notice.error_code >= 0 && (first.error_code < 0 || notice.rank < first.rank)) {
      first = notice;
    }
  }
  return first;
}

}  // namespace

void Notice::SetText(const std::string& words) {
  std::strncpy(text, words.c_str(), sizeof text - 1);
}

PeerSockets::PeerSockets(Bootstrap& bootstrap, const Topology& topology,
                         std::chrono::nanoseconds timeout, Reach reach)
    : rank_(bootstrap.rank()),
      topology_(topology),
      timeout_(timeout),
      reach_(reach),
      sockets_(static_cast<size_t>(bootstrap.world())) {
  const std::string name = RandomName();
  const FileDescriptor listener = Listen(name, world());
  if (!listener.valid() && reach == Reach::kNeighbours) {
    internal::ThrowErrno("listening on a Unix socket");
  }
  const std::vector<std::string> names = bootstrap.AllGather(name);
  // One character a rank: whether this rank reaches it. Every rank listens before any connects.
  std::string reached(static_cast<size_t>(world()), '1');
  ConnectToLower(names, &reached);
  const std::vector<std::string> all = bootstrap.AllGather(reached);
  for (int from = 0; from < world() && reach == Reach::kNeighbours; ++from) {
    const size_t to = all[static_cast<size_t>(from)].find('0');
    if (to != std::string::npos) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format(
              "ranks {} and {} do not share one machine's memory (no Unix socket between them); "
              "nodes on several machines are not supported yet",
              to, from),
          {rank_, static_cast<int>(to), "", "set-up"});
    }
  }
  AcceptHigher(listener.get(), all);
}

void PeerSockets::ConnectToLower(const std::vector<std::string>& names, std::string* reached) {
  for (int peer = 0; peer < rank_; ++peer) {
    if (!Wanted(peer)) continue;
    FileDescriptor fd(::socket(AF_UNIX, kSocketType, 0));
    sockaddr_un address;
    const socklen_t length = Address(names[static_cast<size_t>(peer)], &address);
    const auto hello = static_cast<int32_t>(rank_);
    if (!fd.valid() || connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
      (*reached)[static_cast<size_t>(peer)] = '0';
      continue;
    }
    sockets_[static_cast<size_t>(peer)] = std::move(fd);
  }
}

void PeerSockets::AcceptHigher(int listener, const std::vector<std::string>& reached) {
  const auto expects = [&](int peer) {
    return peer > rank_ && peer < world() && Wanted(peer) &&
           reached[static_cast<size_t>(peer)][static_cast<size_t>(rank_)] == '1';
  };
  for (int expected = rank_ + 1; expected < world(); ++expected) {
    if (!expects(expected)) continue;
    // The peers have connected already: these waits are short.
    const auto deadline = Clock::now() + timeout_;
    int32_t peer = -1;
    FileDescriptor fd;
    if (WaitFor(listener, POLLIN, deadline))
      fd = FileDescriptor(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (fd.valid() && WaitFor(fd.get(), POLLIN, deadline)) recv(fd.get(), &peer, sizeof peer, 0);
    if (!expects(peer) || sockets_[static_cast<size_t>(peer)].valid()) {
      if (reach_ == Reach::kMachine) continue;
      throw Error(ErrorCode::kTimeout,
                  fmt::format("rank {}: set-up: a peer connected but did not say hello", rank_));
    }
    sockets_[static_cast<size_t>(peer)] = std::move(fd);
  }
}

bool PeerSockets::Wanted(int peer) const {
  return peer != rank_ &&
         (reach_ == Reach::kMachine || topology_.Node(peer) == topology_.Node(rank_) ||
          topology_.Local(peer) == topology_.Local(rank_));
}

template <typename Predicate>
std::vector<ReceivedNotice> PeerSockets::ExchangeWith(const Predicate& chosen, const Notice& mine,
                                                      int memory, const std::string& what) {
  std::vector<ReceivedNotice> all(sockets_.size());
  all[static_cast<size_t>(rank_)].notice = mine;
  for (int peer = 0; peer < world(); ++peer) {
    if (IsNeighbour(peer) && chosen(peer)) Send(peer, mine, memory);
  }
  for (int peer = 0; peer < world(); ++peer) {
    if (IsNeighbour(peer) && chosen(peer)) all[static_cast<size_t>(peer)] = Receive(peer, what);
  }
  return all;
}

std::vector<ReceivedNotice> PeerSockets::Exchange(const Notice& mine, int memory,
                                                  const std::string& what) {
  Notice signed_by = mine;
  signed_by.rank = rank_;
  return ExchangeWith([](int) { return true; }, signed_by, memory, what);
}

void PeerSockets::Agree(const Error* error, const std::string& what) {
  Notice first;
  if (error != nullptr) SetNotice(*error, rank_, &first);
  const int node = topology_.Node(rank_);
  const auto same_node = [&](int peer) { return topology_.Node(peer) == node; };
  const auto same_rail = [&](int peer) { return topology_.Node(peer) != node; };
  first = FirstError(ExchangeWith(same_node, first, -1, what), first);
  first = FirstError(ExchangeWith(same_rail, first, -1, what), first);
  if (first.error_code < 0) return;
  throw Error(static_cast<ErrorCode>(first.error_code),
              fmt::format("rank {}: {}", first.rank, first.text), {rank_, first.rank, "", what});
}

void PeerSockets::Send(int peer, const Notice& notice, int memory) const {
  iovec part{const_cast<Notice*>(&notice), sizeof notice};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (memory >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &memory, sizeof memory);
  }
  if (sendmsg(socket(peer), &message, MSG_NOSIGNAL) != sizeof notice) {
    throw Error(ErrorCode::kPeerDead,
                fmt::format("rank {}: rank {} has left ({}); restart the job", rank_, peer,
                            std::strerror(errno)),
                {rank_, peer, "", "set-up"});
  }
}

ReceivedNotice PeerSockets::Receive(int peer, const std::string& what) const {
  const ErrorContext context{rank_, peer, "", what};
  if (!WaitFor(socket(peer), POLLIN, Clock::now() + timeout_)) {
    throw Error(
        ErrorCode::kTimeout,
        fmt::format("rank {}: {}: waited {:.1f} s for rank {}, which did not make the same call",
                    rank_, what, std::chrono::duration<double>(timeout_).count(), peer),
        context);
  }
  ReceivedNotice received;
  iovec part{&received.notice, sizeof received.notice};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket(peer), &message, MSG_CMSG_CLOEXEC) != sizeof received.notice) {
    throw Error(ErrorCode::kPeerDead,
                fmt::format("rank {}: {}: rank {} has left; restart the job", rank_, what, peer),
                context);
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    received.memory = FileDescriptor(fd);
  }
  return received;
}

FileDescriptor PeerSockets::OpenProcess(int peer) const {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(socket(peer), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 ||
      credentials.pid <= 0 || credentials.pid == getpid()) {
    return {};
  }
  return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
}

}  // namespace tide::machine
