// The sentences a failed call says: what was expected, what came, what to do.
#ifndef TIDE_FABRIC_HOST_CALL_REPORT_H_
#define TIDE_FABRIC_HOST_CALL_REPORT_H_

#include "fabric/fabric.h"
#include "fabric/host/control_page.h"
#include "tide/error.h"

namespace tide::host {

// Two ranks entered call number `sequence` with different operations, groups, dtypes or parameters.
Error MismatchError(const Call& call, int rank, int peer, const CallIdentity& theirs);
// The producer of the counter that `blocked` waits for has ended.
Error PeerGoneError(const Call& call, int rank, const Operation& blocked);
// The producer did not come within `seconds`, because of the culprit: itself, or a rank that it
// waits for in turn. `page` is the culprit's, invalid if this rank can't see it.
Error TimeoutError(const Call& call, int rank, const Operation& blocked, int culprit,
                   const ControlPage& page, double seconds);

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_CALL_REPORT_H_
