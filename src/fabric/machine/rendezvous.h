// Sockets between ranks that share memory: they prove that ranks share a machine, carry memory
// descriptors, and tell when a peer is gone.
//
// Where ranks exchange payload (Reach::kNeighbours), a rank is connected with its neighbours only:
// the ranks of its node and those of its rail (equal local index). Any two ranks are two steps
// apart, first inside a node, then along a rail. Where they only look after each other
// (Reach::kMachine), it is connected with whomever it reaches.
//
// Addresses are abstract Unix names with 128 random bits, exchanged through the Bootstrap: nothing
// appears in the file system, and a name that can't be reached means another machine or container.
#ifndef TIDE_FABRIC_MACHINE_RENDEZVOUS_H_
#define TIDE_FABRIC_MACHINE_RENDEZVOUS_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "fabric/machine/shared_memory.h"
#include "tide/bootstrap.h"
#include "tide/communicator.h"
#include "tide/error.h"
#include "tide/layout.h"

namespace tide::machine {

// What ranks tell each other when memory is shared. An error on one rank is raised by all.
struct Notice {
  int64_t bytes = 0;
  uint64_t nonce = 0;
  int32_t error_code = -1;  // an ErrorCode, or -1
  int32_t rank = -1;        // who speaks, or whose error it is
  SegmentKind kind = SegmentKind::kPerRank;
  char text[480] = {};  // the error's sentence, or the segment's label

  void SetText(const std::string& words);  // cut to fit
};

struct ReceivedNotice {
  Notice notice;
  FileDescriptor memory;
};

enum class Reach : uint8_t {
  kNeighbours,  // the same Error(kUnsupported) on every rank if two of them can't reach each other
  kMachine,     // everybody who can be reached, perhaps nobody
};

class PeerSockets {
 public:
  // Collective.
  PeerSockets(Bootstrap& bootstrap, const Topology& topology, std::chrono::nanoseconds timeout,
              Reach reach);

  // Gives `mine` and the descriptor `memory` (or -1) to every neighbour and returns theirs, by
  // rank. The own entry holds the own notice and no descriptor; others that are no neighbours stay
  // empty (rank -1). Throws Error(kTimeout) or kPeerDead naming the rank.
  std::vector<ReceivedNotice> Exchange(const Notice& mine, int memory, const std::string& what);
  // For kNeighbours. Collective over all ranks, and no rank goes on before all have come. Throws
  // the error of the lowest rank that has one on every rank; `error` is null for none.
  void Agree(const Error* error, const std::string& what);

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(sockets_.size()); }
  const Topology& topology() const { return topology_; }
  // Another rank, with a socket to it.
  bool IsNeighbour(int peer) const {
    return peer >= 0 && peer < world() && sockets_[static_cast<size_t>(peer)].valid();
  }
  // -1 unless a neighbour.
  int socket(int peer) const { return sockets_[static_cast<size_t>(peer)].get(); }
  // A descriptor that becomes readable when the peer's process ends; -1 for threads of one process.
  FileDescriptor OpenProcess(int peer) const;

 private:
  // Whether the two shall be neighbours if they reach each other.
  bool Wanted(int peer) const;
  void ConnectToLower(const std::vector<std::string>& names, std::string* reached);
  // `reached` by rank, as ConnectToLower found.
  void AcceptHigher(int listener, const std::vector<std::string>& reached);
  // Exchanges with the neighbours that `chosen` admits.
  template <typename Predicate>
  std::vector<ReceivedNotice> ExchangeWith(const Predicate& chosen, const Notice& mine, int memory,
                                           const std::string& what);
  void Send(int peer, const Notice& notice, int memory) const;
  ReceivedNotice Receive(int peer, const std::string& what) const;

  int rank_;
  Topology topology_;
  std::chrono::nanoseconds timeout_;
  Reach reach_;
  std::vector<FileDescriptor> sockets_;
};

}  // namespace tide::machine

#endif  // TIDE_FABRIC_MACHINE_RENDEZVOUS_H_
