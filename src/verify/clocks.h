// Happens-before as vector clocks: how far each queue knows every other queue to have come.
//
// A queue's clock changes only where it waits, so clocks are shared between signals and copied on
// the next wait: memory follows the number of increments under way, not the number of operations.
//
// A piece of a put lands at a time of its own. It is ordered before whatever follows a wait that
// cannot have passed without it, and before later pieces of the same wire: one sender's queue, one
// peer, one context.
#ifndef TIDE_VERIFY_CLOCKS_H_
#define TIDE_VERIFY_CLOCKS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace tide::verify {

inline constexpr uint32_t kNone = UINT32_MAX;

// One access: step `tick` of a queue, or a piece of a put.
struct Epoch {
  uint32_t queue = kNone;  // kPiece: `tick` is the piece; kNone: nobody
  uint32_t tick = 0;

  static constexpr uint32_t kPiece = kNone - 1;
  bool piece() const { return queue == kPiece; }
  bool none() const { return queue == kNone; }
  bool operator==(const Epoch&) const = default;
};

using Clock = std::vector<uint32_t>;

// All that a queue had done or knew of when it had completed `tick` steps.
struct Stamp {
  std::shared_ptr<const Clock> known;
  uint32_t queue = 0;
  uint32_t tick = 0;

  uint32_t Knows(uint32_t other) const { return other == queue ? tick : (*known)[other]; }
};

// Who makes an access, and what happened before it.
struct Actor {
  Epoch epoch;
  uint32_t queue = 0;
  uint32_t done = 0;  // steps that `queue` had completed
  const Clock* known = nullptr;
  uint32_t wire = kNone;  // pieces only
};

class Clocks {
 public:
  explicit Clocks(size_t queues);

  // The queue's own progress is `done` steps.
  Stamp Now(uint32_t queue, uint32_t done) const { return {known_[queue], queue, done}; }
  Actor ActorOf(uint32_t queue, uint32_t tick) const;
  void Join(uint32_t queue, const Stamp& stamp);

  // The next piece of the wire (queue, peer, context), put by step `tick`.
  Actor NewPiece(uint32_t queue, uint32_t tick, int peer, int context);
  // A wait, step `tick` of `queue`, proves that the piece has landed, and so have the earlier ones
  // of its wire.
  void Acquire(uint32_t piece, uint32_t queue, uint32_t tick);

  bool HasAcquired(uint32_t piece, uint32_t queue) const;

  bool Before(Epoch earlier, const Actor& actor) const;

  struct Piece {
    uint32_t queue = 0;  // that put it
    uint32_t tick = 0;
    uint32_t wire = 0;
    uint32_t index = 0;           // on the wire
    std::vector<Epoch> acquired;  // first wait of each queue that proves it
  };
  const Piece& piece(uint32_t index) const { return pieces_[index]; }

 private:
  struct Wire {
    std::vector<uint32_t> pieces;
    std::map<uint32_t, size_t> acquired;  // by queue: how many pieces
  };

  std::vector<std::shared_ptr<Clock>> known_;
  std::vector<Piece> pieces_;
  std::vector<Wire> wires_;
  std::map<std::tuple<uint32_t, int, int>, uint32_t> wire_index_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_CLOCKS_H_
