// Cuts the bytes of one transfer into put pieces: heads and tails, striped over rail contexts.
#ifndef TIDE_PLAN_STRIPING_H_
#define TIDE_PLAN_STRIPING_H_

#include <cstdint>
#include <vector>

#include "tide/program.h"

namespace tide::internal {

// A contiguous run of bytes from the sender's buffers to the receiver's.
struct Run {
  Ref dst;
  Ref src;
  int64_t bytes = 0;
};

struct StripeOptions {
  int contexts = 1;
  // A transfer gets as many stripes as have at least this many bytes.
  int64_t min_bytes = 1;
};

// Pieces that carry `runs` in order, stripe i on context i, which count as `part` of `signal` (0
// for kHead). At least one piece: an empty transfer still signals.
std::vector<PutPiece> Stripe(const std::vector<Run>& runs, const StripeOptions& options,
                             CounterKind signal, int part);

// The counters on the receiver that these pieces of `sender` raise, and by how much.
std::vector<Increment> Increments(const std::vector<PutPiece>& pieces, int sender);

// Removes the first `bytes` bytes of `runs` and returns them.
std::vector<Run> TakeFront(std::vector<Run>* runs, int64_t bytes);

int64_t Bytes(const std::vector<Run>& runs);

}  // namespace tide::internal

#endif  // TIDE_PLAN_STRIPING_H_
