// Rows of the tables of faults that no run on a fabric can show; `Why` is the fabric's own reasons.
#ifndef TIDE_TESTS_TESTING_MASKED_FAULTS_H_
#define TIDE_TESTS_TESTING_MASKED_FAULTS_H_

#include <string>
#include <utility>
#include <vector>

#include "verify/mutants.h"

namespace tide::testing {

// Undetected mutants of a scenario (empty: of any) whose description contains `operation`.
template <typename Why>
struct MaskedFaults {
  std::string scenario;
  std::string operation;
  Why why;
  std::vector<std::pair<verify::MutantKind, int>> counts;
};

inline constexpr int kEvery = -1;  // all that match

inline std::vector<std::pair<verify::MutantKind, int>> Waits(int dropped, int weakened, int pairs) {
  return {{verify::MutantKind::kDroppedWait, dropped},
          {verify::MutantKind::kWeakenedWait, weakened},
          {verify::MutantKind::kDroppedPair, pairs}};
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_MASKED_FAULTS_H_
