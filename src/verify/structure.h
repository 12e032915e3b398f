// Rules of tide/program.h that need no schedule: bounds, peers, counters, events.
#ifndef TIDE_VERIFY_STRUCTURE_H_
#define TIDE_VERIFY_STRUCTURE_H_

#include "verify/findings.h"
#include "verify/input.h"

namespace tide::verify {

// Returns whether the programs are sound enough to be simulated: nothing but unbalanced counters
// was found.
bool CheckStructure(const Input& input, Findings* findings);

}  // namespace tide::verify

#endif  // TIDE_VERIFY_STRUCTURE_H_
