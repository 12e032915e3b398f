// Does the verifier object to every mutant? An operation that can go without an objection is
// redundant, or the verifier is blind.
#ifndef TIDE_VERIFY_MUTATE_H_
#define TIDE_VERIFY_MUTATE_H_

#include <array>
#include <string>
#include <vector>

#include "verify/input.h"
#include "verify/mutants.h"

namespace tide::verify {

struct MutationRow {
  int injected = 0;
  int detected = 0;
  std::vector<std::string> explained;   // undetected, and it is known why they are harmless
  std::vector<std::string> undetected;  // neither
};

struct MutationTable {
  std::array<MutationRow, kMutantKinds> rows;  // by MutantKind

  bool ok() const;
  void Add(const MutationTable& other);
};

// Puts each mutant of the last call's programs into every sequence, in the place of these programs
// wherever they occur, until one of the sequences is no longer safe. The sequences must be safe
// without it.
MutationTable RunMutation(std::vector<Input> sequences, const std::vector<int>& ranks,
                          const VerifyOptions& options);

std::string ToText(const MutationTable& table);

}  // namespace tide::verify

#endif  // TIDE_VERIFY_MUTATE_H_
