// Faulty variants of a collective's programs, each with one mistake: for the verifier, which must
// object to every one of them, and for fault injection into real runs.
#ifndef TIDE_VERIFY_MUTANTS_H_
#define TIDE_VERIFY_MUTANTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tide/program.h"

namespace tide::verify {

enum class MutantKind : uint8_t {
  kDroppedWait,             // one safety wait
  kWeakenedWait,            // waits for one increment less
  kDroppedAwait,            // one await of an event; not of the gate
  kDroppedPair,             // one safety wait with the signal that ends it
  kLostSignal,              // a signal other than a credit
  kLostCredit,              // a signal that allows memory to be used again
  kMissingCompletionFence,  // all waits for the siblings' parts of the landing
  kMissingZero,             // one clearing of stale blocks or padding
  kWrongSubSlice,           // an operand is taken from, or a result goes to, the neighbouring slice
  kDuplicatedPut,           //
  kWrongBlock,              // a put, push or refresh goes to the neighbouring block
  kEarlySourceRelease,      // read_done is recorded before the last read of a source
  kEarlyOutboxReuse,        // no wait for sent outbox blocks
  kEarlyInboxReuse,         // no wait for the credits of an inbox generation
  kSwappedCalls,            // one rank issues two calls in the other order
};
inline constexpr int kMutantKinds = 15;
const char* Name(MutantKind kind);

struct Mutant {
  MutantKind kind = MutantKind::kDroppedWait;
  std::string description;
  int operation = -1;  // of the original program, where the fault is one operation's
  // Replace the programs of their ranks; none for kSwappedCalls, which changes the sequence.
  std::vector<Program> programs;
};

// Programs of all ranks, by rank.
using Programs = std::vector<std::shared_ptr<const Program>>;

// Every mutant of one kind with its fault on `rank`; the peer's program changes only where a signal
// goes with its wait.
std::vector<Mutant> MakeMutants(MutantKind kind, const Programs& programs, int rank);
std::vector<Mutant> MakeMutants(const Programs& programs, int rank);

}  // namespace tide::verify

#endif  // TIDE_VERIFY_MUTANTS_H_
