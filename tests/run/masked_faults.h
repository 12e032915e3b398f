// Faults that no run on the host fabric can show, and why: its calls block and its puts complete in
// order. They are for the verifier, whose model assumes neither.
#ifndef TIDE_TESTS_RUN_MASKED_FAULTS_H_
#define TIDE_TESTS_RUN_MASKED_FAULTS_H_

#include <utility>
#include <vector>

#include "testing/masked_faults.h"

namespace tide::testing {

enum class Why {
  kReady,       // a call starts when its caller is ready: there is nothing to wait for
  kOwnCalls,    // a call ends when all its queues have ended: this rank's earlier calls are over
  kHeard,       // calls block: before this rank gets there, or before it could end the call before,
                // others have told it as much, or the next call can't come that far
  kInOrder,     // a rank's next round follows its puts of this one, and what is waited for later
                // depends on that round
  kRepeated,    // another wait of the same queue says as much
  kTogether,    // the increment before comes at the same point
  kNeverStale,  // no call of this lane ever writes to the blocks that are cleared
};

inline std::vector<MaskedFaults<Why>> MaskedTable() {
  using Kind = verify::MutantKind;
  return {
      {"", "await     ready", Why::kReady, {{Kind::kDroppedAwait, kEvery}}},
      {"", "outbox_free of rank 1 >= +0", Why::kOwnCalls, Waits(kEvery, kEvery, kEvery)},
      {"", "outbox_free[1] of rank 1 >= +0", Why::kOwnCalls, Waits(kEvery, kEvery, kEvery)},
      {"", "spare_free of rank 1 >= +0", Why::kOwnCalls, Waits(kEvery, kEvery, kEvery)},
      {"gather_3x2_cast", "credit", Why::kHeard, Waits(1, 1, 1)},
      {"gather_3x2_cast", "head", Why::kInOrder, Waits(3, 3, 0)},
      {"gather_3x2_cast", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 2}}},
      {"gather_5x1", "entry", Why::kHeard, Waits(2, 2, 2)},
      {"gather_5x1", "head", Why::kInOrder, Waits(4, 4, 0)},
      {"gather_5x1", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 3}}},
      {"gather_9x1_cast", "entry", Why::kHeard, Waits(3, 3, 3)},
      {"gather_9x1_cast", "head", Why::kInOrder, Waits(9, 9, 0)},
      {"gather_9x1_cast", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 7}}},
      {"reduce_2x1", "credit", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_2x1", "no credit", Why::kHeard, {{Kind::kEarlyInboxReuse, 1}}},
      {"reduce_2x1", "no wait for sent", Why::kOwnCalls, {{Kind::kEarlyOutboxReuse, 1}}},
      {"reduce_2x2_direct", "no wait for sent", Why::kOwnCalls, {{Kind::kEarlyOutboxReuse, 1}}},
      {"reduce_2x2_latin", "no wait for sent", Why::kOwnCalls, {{Kind::kEarlyOutboxReuse, 1}}},
      {"reduce_2x2_latin", "reduced", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_2x2_latin", "released", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_2x2_latin", "credit", Why::kHeard, Waits(1, 1, 0)},
      {"reduce_2x4_latin", "no wait for sent", Why::kOwnCalls, {{Kind::kEarlyOutboxReuse, 1}}},
      {"reduce_2x4_latin", "released", Why::kHeard, Waits(3, 3, 3)},
      {"reduce_2x4_latin", "zero", Why::kNeverStale, {{Kind::kMissingZero, 1}}},
      {"reduce_3x2_direct", "credit", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_3x2_direct", "await     local", Why::kRepeated, {{Kind::kDroppedAwait, 1}}},
      {"reduce_3x2_latin", "no wait for sent", Why::kOwnCalls, {{Kind::kEarlyOutboxReuse, 1}}},
      {"reduce_3x2_latin", "released", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_5x1", "credit", Why::kHeard, Waits(4, 4, 4)},
      {"reduce_5x1", "arrived", Why::kInOrder, Waits(4, 4, 0)},
      {"reduce_5x1", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 2}}},
      {"reduce_5x1", "no credit", Why::kHeard, {{Kind::kEarlyInboxReuse, 1}}},
      {"reduce_9x1", "credit", Why::kHeard, Waits(4, 4, 4)},
      {"reduce_9x1", "arrived", Why::kInOrder, Waits(10, 10, 0)},
      {"reduce_9x1", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 7}}},
      {"reduce_9x1", "outbox_free of rank 1 >= +2", Why::kTogether, Waits(0, 1, 0)},
      {"reduce_9x1", "outbox_free of rank 1 >= +4", Why::kTogether, Waits(0, 1, 0)},
  };
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_RUN_MASKED_FAULTS_H_
