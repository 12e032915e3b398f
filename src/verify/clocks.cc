#include "verify/clocks.h"

#include <algorithm>

namespace tide::verify {

Clocks::Clocks(size_t queues) {
  const auto zero = std::make_shared<Clock>(queues);
  known_.assign(queues, zero);
}

Actor Clocks::ActorOf(uint32_t queue, uint32_t tick) const {
  return {{queue, tick}, queue, tick - 1, known_[queue].get(), kNone};
}

void Clocks::Join(uint32_t queue, const Stamp& stamp) {
  if (stamp.queue == queue) return;
  auto& known = known_[queue];
  // Knowing a queue up to a step means knowing all that it knew there.
  if ((*known)[stamp.queue] >= stamp.tick) return;
  if (known.use_count() > 1) known = std::make_shared<Clock>(*known);
  Clock& mine = *known;
  const Clock& theirs = *stamp.known;
  for (size_t q = 0; q < mine.size(); ++q) mine[q] = std::max(mine[q], theirs[q]);
  mine[stamp.queue] = std::max(mine[stamp.queue], stamp.tick);
}

Actor Clocks::NewPiece(uint32_t queue, uint32_t tick, int peer, int context) {
  const auto [found, added] =
      wire_index_.try_emplace({queue, peer, context}, static_cast<uint32_t>(wires_.size()));
  if (added) wires_.emplace_back();
  const uint32_t wire = found->second;
  const auto piece = static_cast<uint32_t>(pieces_.size());
  pieces_.push_back({queue, tick, wire, static_cast<uint32_t>(wires_[wire].pieces.size()), {}});
  wires_[wire].pieces.push_back(piece);
  return {{Epoch::kPiece, piece}, queue, tick - 1, known_[queue].get(), wire};
}

void Clocks::Acquire(uint32_t piece, uint32_t queue, uint32_t tick) {
  Wire& wire = wires_[pieces_[piece].wire];
  size_t& acquired = wire.acquired[queue];
  for (; acquired <= pieces_[piece].index; ++acquired) {
    pieces_[wire.pieces[acquired]].acquired.push_back({queue, tick});
  }
}

bool Clocks::HasAcquired(uint32_t piece, uint32_t queue) const {
  const auto& acquired = pieces_[piece].acquired;
  return std::any_of(acquired.begin(), acquired.end(),
                     [queue](Epoch wait) { return wait.queue == queue; });
}

bool Clocks::Before(Epoch earlier, const Actor& actor) const {
  const auto done = [&](Epoch step) {
    return step.queue == actor.queue ? step.tick <= actor.done
                                     : (*actor.known)[step.queue] >= step.tick;
  };
  if (!earlier.piece()) return done(earlier);
  const Piece& piece = pieces_[earlier.tick];
  // Pieces enter a wire in order, so an earlier one has the lower number.
  if (piece.wire == actor.wire && earlier.tick < actor.epoch.tick) return true;
  return std::any_of(piece.acquired.begin(), piece.acquired.end(), done);
}

}  // namespace tide::verify
