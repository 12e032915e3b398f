// The sentence about two ranks whose calls differ.
#ifndef TIDE_FABRIC_MACHINE_MISMATCH_H_
#define TIDE_FABRIC_MACHINE_MISMATCH_H_

#include <string>

#include "fabric/fabric.h"

namespace tide::machine {

// "call 7: rank 0 entered ..., rank 1 entered ...; expected ...", the same on both ranks. `layout`
// is that of the own group, null for a barrier.
std::string DescribeMismatch(const CallIdentity& ours, int rank, const CallIdentity& theirs,
                             int peer, const GroupLayout* layout);

}  // namespace tide::machine

#endif  // TIDE_FABRIC_MACHINE_MISMATCH_H_
