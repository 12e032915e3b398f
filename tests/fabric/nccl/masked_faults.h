// Faults that no run on the nccl fabric can show, and why. They are for the verifier.
#ifndef TIDE_TESTS_FABRIC_NCCL_MASKED_FAULTS_H_
#define TIDE_TESTS_FABRIC_NCCL_MASKED_FAULTS_H_

#include <utility>
#include <vector>

#include "testing/masked_faults.h"

namespace tide::testing {

enum class NcclWhy {
  kRestored,    // the lowering lets a program that awaits no caller await it: floors do not
  kCaller,      // the caller's stream waits for read_done and for done, whichever comes first
  kHeard,       // what this rank has waited for before, here or in the call between, says as much
  kInOrder,     // a rank's next round follows its puts of this one, and what is waited for later
                // depends on that round
  kRepeated,    // another wait of the same queue says as much
  kTogether,    // the increment before comes at the same point
  kNeverStale,  // no call of this lane ever writes to the blocks that are cleared
};

inline std::vector<MaskedFaults<NcclWhy>> NcclMaskedTable() {
  using Kind = verify::MutantKind;
  using Why = NcclWhy;
  const std::vector<std::pair<Kind, int>> await = {{Kind::kDroppedAwait, 1}};
  const std::vector<std::pair<Kind, int>> release = {{Kind::kEarlySourceRelease, 1}};
  return {
      {"gather_1x4", "await     ready", Why::kRestored, await},
      {"gather_1x4", "multicast", Why::kCaller, release},
      {"gather_1x4_cast", "await     ready", Why::kRestored, await},
      {"gather_1x4_cast", "cast", Why::kCaller, release},
      {"gather_2x1", "await     ready", Why::kRestored, await},
      {"gather_2x1", "copy", Why::kCaller, release},
      {"gather_2x2", "await     read_done", Why::kCaller, await},
      {"gather_2x2_shared", "await     read_done", Why::kCaller, await},
      {"gather_2x4", "await     read_done", Why::kCaller, await},
      {"gather_3x2_cast", "await     read_done", Why::kCaller, await},
      {"gather_3x2_cast", "credit", Why::kHeard, Waits(1, 1, 1)},
      {"gather_3x2_cast", "head", Why::kInOrder, Waits(3, 3, 0)},
      {"gather_3x2_cast", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 1}}},
      {"gather_5x1", "await     ready", Why::kRestored, await},
      {"gather_5x1", "copy", Why::kCaller, release},
      {"gather_5x1", "entry", Why::kHeard, Waits(2, 2, 2)},
      {"gather_5x1", "head", Why::kInOrder, Waits(4, 4, 0)},
      {"gather_5x1", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 2}}},
      {"gather_9x1_cast", "await     ready", Why::kRestored, await},
      {"gather_9x1_cast", "cast", Why::kCaller, release},
      {"gather_9x1_cast", "entry", Why::kHeard, Waits(3, 3, 3)},
      {"gather_9x1_cast", "head", Why::kInOrder, Waits(9, 9, 0)},
      {"gather_9x1_cast", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 3}}},
      {"reduce_1x4", "sum", Why::kCaller, release},
      {"reduce_2x1", "await     ready", Why::kRestored, await},
      {"reduce_2x1", "sum", Why::kCaller, release},
      {"reduce_2x2_latin", "credit[1]", Why::kHeard, Waits(1, 1, 0)},
      {"reduce_2x2_latin", "reduced", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_2x2_latin", "await     local", Why::kCaller, await},
      {"reduce_2x2_latin", "sum", Why::kCaller, release},
      {"reduce_2x4_latin", "await     local", Why::kCaller, await},
      {"reduce_2x4_latin", "sum", Why::kCaller, release},
      {"reduce_2x4_latin", "zero", Why::kNeverStale, {{Kind::kMissingZero, 1}}},
      {"reduce_3x2_direct", "outbox_free of rank 1 >= +0", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_3x2_direct", "await     local", Why::kRepeated, await},
      {"reduce_3x2_latin", "await     local", Why::kCaller, await},
      {"reduce_3x2_latin", "sum", Why::kCaller, release},
      {"reduce_3x2_latin", "outbox_free of rank 1 >= +0", Why::kHeard, Waits(0, 1, 0)},
      {"reduce_5x1", "await     ready", Why::kRestored, await},
      {"reduce_5x1", "sum", Why::kCaller, release},
      {"reduce_5x1", "outbox_free of rank 1 >= +0", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_5x1", "credit", Why::kHeard, Waits(2, 2, 2)},
      {"reduce_5x1", "arrived", Why::kInOrder, Waits(4, 4, 0)},
      {"reduce_5x1", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 2}}},
      {"reduce_9x1", "await     ready", Why::kRestored, await},
      {"reduce_9x1", "sum", Why::kCaller, release},
      {"reduce_9x1", "outbox_free of rank 1 >= +0", Why::kHeard, Waits(1, 1, 1)},
      {"reduce_9x1", "outbox_free of rank 1 >= +2", Why::kTogether, Waits(0, 1, 0)},
      {"reduce_9x1", "outbox_free of rank 1 >= +4", Why::kTogether, Waits(0, 1, 0)},
      {"reduce_9x1", "credit", Why::kHeard, Waits(4, 4, 4)},
      {"reduce_9x1", "arrived", Why::kInOrder, Waits(8, 8, 0)},
      {"reduce_9x1", "put", Why::kInOrder, {{Kind::kDuplicatedPut, 4}}},
  };
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_FABRIC_NCCL_MASKED_FAULTS_H_
