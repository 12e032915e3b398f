// What tests of nccl::Peers begin with: ranks of one node, calls, and no deadline.
#ifndef TIDE_TESTS_FABRIC_NCCL_WATCHED_PEERS_H_
#define TIDE_TESTS_FABRIC_NCCL_WATCHED_PEERS_H_

#include <chrono>
#include <cstring>
#include <string>

#include "fabric/fabric.h"
#include "tide/bootstrap.h"

namespace tide::testing {

// Far longer than a test takes: whatever ends a rank here is not a deadline.
inline constexpr std::chrono::minutes kDeadline{30};

inline Topology OneNode(const Bootstrap& bootstrap) { return {1, bootstrap.world()}; }

inline CallIdentity MakeCall(uint64_t sequence, uint64_t key) {
  CallIdentity identity;
  identity.sequence = sequence;
  identity.key = key;
  identity.group = static_cast<int32_t>(key);
  const std::string text = "call with key " + std::to_string(key);
  std::strncpy(identity.text, text.c_str(), kCallTextBytes - 1);
  return identity;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_WATCHED_PEERS_H_
