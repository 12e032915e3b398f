// Set-up steps that all ranks take together: they exchange what they ask for and whether they
// failed, and raise the same error.
#ifndef TIDE_FABRIC_NCCL_AGREEMENT_H_
#define TIDE_FABRIC_NCCL_AGREEMENT_H_

#include <functional>
#include <string>

#include "tide/bootstrap.h"

namespace tide::nccl {

// Runs `step` on this rank and then tells the others how it went. Throws the error of the first
// rank that has one on all of them; Error(kMismatch) if `request` differs between ranks. `what`
// starts the message: "adding a segment".
void TakeStep(Bootstrap& bootstrap, const std::string& what, const std::string& request,
              const std::function<void()>& step);

// The same, where a step fails for want of a capability: that is Error(kUnsupported) if it is
// missing on every rank and Error(kMismatch) if it is missing on some only.
void TakeCapabilityStep(Bootstrap& bootstrap, const std::string& what,
                        const std::function<void()>& step);

// The same for a capability that there is a way without: returns why it is missing, the same reason
// on every rank; empty if it is there. Missing on some ranks only it is an error, too.
std::string TakeOptionalStep(Bootstrap& bootstrap, const std::string& what,
                             const std::function<void()>& step);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_AGREEMENT_H_
