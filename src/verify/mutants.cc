#include "verify/mutants.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

namespace tide::verify {
namespace {

using Predicate = std::function<bool(const Operation&)>;

bool IsSafetyWait(const Operation& op) {
  return op.kind == OpKind::kWait && op.sync == Sync::kSafety;
}

bool IsCredit(const Operation& op) {
  switch (op.counter.kind) {
    case CounterKind::kCredit:
    case CounterKind::kReleased:
    case CounterKind::kOutboxFree:
    case CounterKind::kSpareFree:
      return true;
    default:
      return false;
  }
}

bool ReadsSource(const Program& program, const Operation& op) {
  const auto source = [&](Ref ref) {
    const BufferKind kind = program.buffers[static_cast<size_t>(ref.buffer)].kind;
    return kind == BufferKind::kShard || kind == BufferKind::kResident ||
           kind == BufferKind::kGradient;
  };
  const auto any = [&](const auto& pieces) {
    return std::any_of(pieces.begin(), pieces.end(),
                       [&](const auto& piece) { return source(piece.src); });
  };
  return any(op.pieces) || any(op.puts) || any(op.casts) ||
         std::any_of(op.sums.begin(), op.sums.end(), [&](const SumPiece& piece) {
           return std::any_of(piece.sources.begin(), piece.sources.end(), source);
         });
}

void Erase(Program* program, size_t index) {
  program->operations.erase(program->operations.begin() + static_cast<std::ptrdiff_t>(index));
}

// Pieces of one operation are much alike: the first few places stand for all.
constexpr size_t kShiftsPerOperation = 4;

struct Spot;
using SpotsOf = std::function<std::vector<Spot>(Operation*)>;

class Maker {
 public:
  Maker(MutantKind kind, const Programs& programs, int rank)
      : kind_(kind), programs_(programs), program_(*programs[static_cast<size_t>(rank)]) {}

  std::vector<Mutant> Make();

 private:
  // One mutant for each operation without which the program goes on.
  void DropEach(const Predicate& which);
  // One mutant without all of them, if there are any.
  void DropAll(const Predicate& which, std::string what);
  void Weaken();
  void DropPairs();
  void Duplicate();
  void ReleaseEarly();
  // Moves places of each data operation in turn.
  void Shift(const SpotsOf& spots_of);

  void Add(std::string description, Program mutant, int operation = -1) {
    mutants_.push_back({kind_, std::move(description), operation, {std::move(mutant)}});
  }
  std::string Describe(size_t index) const {
    return fmt::format("rank {}, operation {}: {}", program_.rank, index,
                       ToString(program_, program_.operations[index]));
  }

  const MutantKind kind_;
  const Programs& programs_;
  const Program& program_;
  std::vector<Mutant> mutants_;
};

void Maker::DropEach(const Predicate& which) {
  for (size_t i = 0; i < program_.operations.size(); ++i) {
    if (!which(program_.operations[i])) continue;
    Program mutant = program_;
    Erase(&mutant, i);
    Add(Describe(i), std::move(mutant), static_cast<int>(i));
  }
}

void Maker::DropAll(const Predicate& which, std::string what) {
  Program mutant = program_;
  if (std::erase_if(mutant.operations, which) == 0) return;
  Add(fmt::format("rank {}: {}", program_.rank, what), std::move(mutant));
}

void Maker::Weaken() {
  for (size_t i = 0; i < program_.operations.size(); ++i) {
    if (!IsSafetyWait(program_.operations[i])) continue;
    Program mutant = program_;
    --mutant.operations[i].value;
    Add(Describe(i), std::move(mutant), static_cast<int>(i));
  }
}

// The index of the signal that makes the counter of `rank` rise by `value`; 0 means the last one.
std::optional<size_t> FindSignal(const Program& producer, int rank, const Counter& counter,
                                 int64_t value) {
  std::optional<size_t> found;
  int64_t increments = 0;
  for (size_t i = 0; i < producer.operations.size(); ++i) {
    const Operation& op = producer.operations[i];
    if (op.peer != rank) continue;
    if (op.kind == OpKind::kSignal && op.counter == counter) {
      ++increments;
      if (increments == value || value == 0) found = i;
    }
    for (const PutPiece& put : op.puts) {
      if (put.signal == counter.kind && put.signal_index == counter.index) ++increments;
    }
  }
  return found;
}

void Maker::DropPairs() {
  for (size_t i = 0; i < program_.operations.size(); ++i) {
    const Operation wait = program_.operations[i];
    if (!IsSafetyWait(wait)) continue;
    const Program& peer = *programs_[static_cast<size_t>(wait.counter.producer)];
    const auto signal = FindSignal(peer, program_.rank, wait.counter, wait.value);
    if (!signal.has_value()) continue;
    Program waiter = program_;
    Erase(&waiter, i);
    for (Operation& op : waiter.operations) {
      const bool later = op.kind == OpKind::kWait && op.counter == wait.counter && wait.value > 0 &&
                         op.value >= wait.value;
      if (later) --op.value;
    }
    for (Increment& increment : waiter.increments) {
      if (increment.counter == wait.counter) --increment.value;
    }
    Mutant& mutant = mutants_.emplace_back();
    mutant.kind = kind_;
    mutant.description = Describe(i);
    mutant.operation = static_cast<int>(i);
    if (peer.rank == program_.rank) {
      const size_t at = *signal > i ? *signal - 1 : *signal;
      Erase(&waiter, at);
    } else {
      Program signaller = peer;
      Erase(&signaller, *signal);
      mutant.programs.push_back(std::move(signaller));
    }
    mutant.programs.push_back(std::move(waiter));
  }
}

void Maker::Duplicate() {
  for (size_t i = 0; i < program_.operations.size(); ++i) {
    if (program_.operations[i].kind != OpKind::kPut) continue;
    Program mutant = program_;
    mutant.operations.insert(mutant.operations.begin() + static_cast<std::ptrdiff_t>(i),
                             program_.operations[i]);
    Add(Describe(i), std::move(mutant), static_cast<int>(i));
  }
}

void Maker::ReleaseEarly() {
  const auto& operations = program_.operations;
  const auto record = std::find_if(operations.begin(), operations.end(), [](const Operation& op) {
    return op.kind == OpKind::kRecord && op.event.kind == EventKind::kReadDone;
  });
  const auto read = std::find_if(operations.rbegin(), operations.rend(),
                                 [this](const Operation& op) { return ReadsSource(program_, op); });
  if (record == operations.end() || read == operations.rend()) return;
  const auto from = static_cast<size_t>(record - operations.begin());
  const auto to = static_cast<size_t>(operations.rend() - read) - 1;
  if (to > from) return;
  Program mutant = program_;
  Operation moved = *record;
  moved.queue = operations[to].queue;
  Erase(&mutant, from);
  mutant.operations.insert(mutant.operations.begin() + static_cast<std::ptrdiff_t>(to),
                           std::move(moved));
  Add(Describe(to), std::move(mutant));
}

// A place that an operation names, and how many bytes of it.
struct Spot {
  const char* what;
  Ref* ref;
  int64_t bytes;
};

int64_t Bytes(int64_t elems, DType dtype) { return elems * static_cast<int64_t>(ItemSize(dtype)); }

// Where copies and puts come from, or go to.
std::vector<Spot> Ends(Operation* op, const char* what, Ref Piece::*of_piece,
                       Ref PutPiece::*of_put) {
  std::vector<Spot> spots;
  for (Piece& piece : op->pieces) {
    // The neighbour of a pitched piece is one of its own rows.
    const bool one_row = piece.rows == 1 && op->kind != OpKind::kZero;
    if (one_row) spots.push_back({what, &(piece.*of_piece), piece.row_bytes});
  }
  for (PutPiece& put : op->puts) spots.push_back({what, &(put.*of_put), put.bytes});
  return spots;
}

// Where operands come from and sums go to.
std::vector<Spot> Slices(Operation* op) {
  std::vector<Spot> spots = Ends(op, "source", &Piece::src, &PutPiece::src);
  for (CastPiece& cast : op->casts) {
    spots.push_back({"source", &cast.src, Bytes(cast.elems, cast.src_dtype)});
  }
  for (SumPiece& sum : op->sums) {
    for (Ref& source : sum.sources) {
      spots.push_back({"source", &source, Bytes(sum.elems, sum.src_dtype)});
    }
    spots.push_back({"result", &sum.dst, Bytes(sum.elems, sum.dst_dtype)});
  }
  for (LandPiece& land : op->lands) {
    spots.push_back({"block", &land.block, Bytes(land.elems, DType::kF32)});
    spots.push_back({"result", &land.dst, Bytes(land.elems, land.dst_dtype)});
  }
  return spots;
}

// Where copies, puts and refreshes go to.
std::vector<Spot> Blocks(Operation* op) {
  std::vector<Spot> spots = Ends(op, "block", &Piece::dst, &PutPiece::dst);
  for (CastPiece& cast : op->casts) {
    const bool to_others = op->kind == OpKind::kRefresh;
    if (to_others) spots.push_back({"block", &cast.dst, Bytes(cast.elems, cast.dst_dtype)});
  }
  return spots;
}

// Up to the next slice or, at the end of the buffer, down to the one before; 0 if there is none.
int64_t Neighbour(const Program& program, const Spot& spot) {
  const int64_t end = program.buffers[static_cast<size_t>(spot.ref->buffer)].bytes;
  if (spot.ref->offset + 2 * spot.bytes <= end) return spot.bytes;
  return spot.ref->offset >= spot.bytes ? -spot.bytes : 0;
}

void Maker::Shift(const SpotsOf& spots_of) {
  for (size_t i = 0; i < program_.operations.size(); ++i) {
    Operation probe = program_.operations[i];
    const size_t spots = spots_of(&probe).size();
    for (size_t s = 0; s < std::min(spots, kShiftsPerOperation); ++s) {
      Program mutant = program_;
      const Spot spot = spots_of(&mutant.operations[i])[s];
      const int64_t by = Neighbour(program_, spot);
      if (by == 0) continue;
      spot.ref->offset += by;
      Add(fmt::format("{}, {} moved by {} bytes", Describe(i), spot.what, by), std::move(mutant));
    }
  }
}

std::vector<Mutant> Maker::Make() {
  const bool reduces = program_.lane == Lane::kReduceScatter;
  const auto waits_for = [](CounterKind kind, int index = -1) -> Predicate {
    return [=](const Operation& op) {
      return op.kind == OpKind::kWait && op.counter.kind == kind &&
             (index < 0 || op.counter.index == index);
    };
  };
  switch (kind_) {
    case MutantKind::kDroppedWait:
      DropEach(IsSafetyWait);
      break;
    case MutantKind::kWeakenedWait:
      Weaken();
      break;
    case MutantKind::kDroppedAwait:
      DropEach([](const Operation& op) {
        return op.kind == OpKind::kAwait && op.event.kind != EventKind::kGate;
      });
      break;
    case MutantKind::kDroppedPair:
      DropPairs();
      break;
    case MutantKind::kLostSignal:
      DropEach([](const Operation& op) { return op.kind == OpKind::kSignal && !IsCredit(op); });
      break;
    case MutantKind::kLostCredit:
      DropEach([](const Operation& op) { return op.kind == OpKind::kSignal && IsCredit(op); });
      break;
    case MutantKind::kMissingCompletionFence:
      DropAll(waits_for(CounterKind::kLanded), "no wait for the siblings' parts");
      break;
    case MutantKind::kMissingZero:
      DropEach([](const Operation& op) { return op.kind == OpKind::kZero; });
      break;
    case MutantKind::kWrongSubSlice:
      Shift(Slices);
      break;
    case MutantKind::kDuplicatedPut:
      Duplicate();
      break;
    case MutantKind::kWrongBlock:
      Shift(Blocks);
      break;
    case MutantKind::kEarlySourceRelease:
      ReleaseEarly();
      break;
    case MutantKind::kEarlyOutboxReuse:
      DropAll(waits_for(CounterKind::kOutboxFree), "no wait for sent outbox blocks");
      break;
    case MutantKind::kEarlyInboxReuse:
      for (int g = 0; reduces && g < CounterIndices(CounterKind::kCredit); ++g) {
        DropAll(waits_for(CounterKind::kCredit, g), fmt::format("no credit for inbox[{}]", g));
      }
      break;
    case MutantKind::kSwappedCalls:
      mutants_.push_back({kind_, fmt::format("rank {}: two calls swapped", program_.rank), -1, {}});
      break;
  }
  return std::move(mutants_);
}

}  // namespace

const char* Name(MutantKind kind) {
  static constexpr const char* kNames[kMutantKinds] = {
      "dropped wait",       "weakened wait",     "dropped await",      "dropped pair",
      "lost signal",        "lost credit",       "missing completion", "missing zero",
      "wrong sub-slice",    "duplicated put",    "wrong block",        "early source release",
      "early outbox reuse", "early inbox reuse", "swapped calls"};
  return kNames[static_cast<size_t>(kind)];
}

std::vector<Mutant> MakeMutants(MutantKind kind, const Programs& programs, int rank) {
  return Maker(kind, programs, rank).Make();
}

std::vector<Mutant> MakeMutants(const Programs& programs, int rank) {
  std::vector<Mutant> all;
  for (int kind = 0; kind < kMutantKinds; ++kind) {
    for (Mutant& mutant : MakeMutants(static_cast<MutantKind>(kind), programs, rank)) {
      all.push_back(std::move(mutant));
    }
  }
  return all;
}

}  // namespace tide::verify
