#include "plan/striping.h"

#include <algorithm>

#include "tide/plan.h"

namespace tide::internal {

int64_t Bytes(const std::vector<Run>& runs) {
  int64_t bytes = 0;
  for (const Run& run : runs) bytes += run.bytes;
  return bytes;
}

std::vector<Run> TakeFront(std::vector<Run>* runs, int64_t bytes) {
  std::vector<Run> front;
  size_t whole = 0;
  while (whole < runs->size() && bytes >= (*runs)[whole].bytes) {
    bytes -= (*runs)[whole].bytes;
    front.push_back((*runs)[whole++]);
  }
  runs->erase(runs->begin(), runs->begin() + static_cast<std::ptrdiff_t>(whole));
  if (bytes > 0 && !runs->empty()) {
    Run& cut = runs->front();
    front.push_back({cut.dst, cut.src, bytes});
    cut.dst.offset += bytes;
    cut.src.offset += bytes;
    cut.bytes -= bytes;
  }
  return front;
}

std::vector<PutPiece> Stripe(const std::vector<Run>& runs, const StripeOptions& options,
                             CounterKind signal, int part) {
  std::vector<PutPiece> pieces;
  std::vector<Run> left = runs;
  const int64_t total = Bytes(runs);
  const int64_t stripes =
      std::clamp<int64_t>(total / std::max<int64_t>(options.min_bytes, 1), 1, options.contexts);
  const int64_t stripe_bytes = AlignUp((total + stripes - 1) / stripes, kStagingAlignment);
  for (int context = 0; Bytes(left) > 0; ++context) {
    for (const Run& run : TakeFront(&left, stripe_bytes)) {
      if (run.bytes == 0) continue;
      pieces.push_back(
          {run.dst, run.src, run.bytes, context, signal, part * kMaxContexts + context});
    }
  }
  if (pieces.empty()) {
    const Run nothing = runs.empty() ? Run() : runs.front();
    pieces.push_back({nothing.dst, nothing.src, 0, 0, signal, part * kMaxContexts});
  }
  return pieces;
}

std::vector<Increment> Increments(const std::vector<PutPiece>& pieces, int sender) {
  std::vector<Increment> increments;
  for (const PutPiece& piece : pieces) {
    const Counter counter{piece.signal, sender, piece.signal_index};
    if (increments.empty() || increments.back().counter != counter) {
      increments.push_back({counter, 0});
    }
    ++increments.back().value;
  }
  return increments;
}

}  // namespace tide::internal
