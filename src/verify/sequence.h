// Makes inputs from groups: plans the programs of all ranks and adds the caller.
//
// The caller is as weak as its data allows: it issues calls without waiting for earlier ones, reads
// a landing only before it needs it again, and frees sources on queues of their own.
#ifndef TIDE_VERIFY_SEQUENCE_H_
#define TIDE_VERIFY_SEQUENCE_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "verify/input.h"

namespace tide::verify {

enum class Role : uint8_t { kChecked, kPredecessor };

// Programs of all ranks, planned once for each group, bank and collective.
class ProgramCache {
 public:
  using Programs = std::vector<std::shared_ptr<const Program>>;

  // `check_interrupt`: see VerifyOptions.
  explicit ProgramCache(
      const VerifySetup& setup, std::function<void()> check_interrupt = [] {})
      : setup_(setup), check_interrupt_(std::move(check_interrupt)) {}
  const VerifySetup& setup() const { return setup_; }
  const Programs& AllGather(int group);
  const Programs& Refresh(int group);
  const Programs& ReduceScatter(int group, int bank);

 private:
  const VerifySetup& setup_;
  const std::function<void()> check_interrupt_;
  const Programs& AllGather(int group, const AllGatherOptions& options, Programs* programs);
  std::map<int, Programs> all_gather_;
  std::map<int, Programs> refresh_;
  std::map<std::pair<int, int>, Programs> reduce_scatter_;
};

class Sequence {
 public:
  Sequence(std::string name, ProgramCache* cache, LandingModel model, int first_bank = 0);

  // The landing is one of a numbered set.
  void AllGather(int group, int landing, Role role = Role::kChecked);
  // The landing holds what the group's last all-gather has brought.
  void Refresh(int group, int landing);
  // Banks alternate from call to call. landing >= 0: the gradients are copied into it first.
  void ReduceScatter(int group, int landing = -1, Role role = Role::kChecked);
  Input Finish();

 private:
  // What a landing holds, and how its next user must wait.
  struct Landing {
    int object = -1;
    std::vector<CallerStep> release;  // await and read, or await
  };

  void Gather(const ProgramCache::Programs& programs, int group, int landing, Role role);
  Call& NewCall(const ProgramCache::Programs& programs, Role role);
  int AddObject(std::string name, bool lane_owned = false, bool per_node = false);
  // Places for the program's regions of the lane, and an object of its own for each other buffer.
  void PlaceBuffers(Call* call);
  Landing& LandingOf(int index);
  void Release(Landing* landing, Call* call);
  void Ready(Call* call) const;
  int last_call() const { return static_cast<int>(input_.calls.size()) - 1; }

  ProgramCache& cache_;
  const VerifySetup& setup_;
  const LandingModel model_;
  Input input_;
  std::map<int, Landing> landings_;
  std::map<std::pair<BufferKind, int>, int> regions_;  // objects of the lanes
  std::vector<CallerStep> frees_;
  std::vector<CallerStep> results_;
  int bank_;
};

// The sequences behind VerifyAllGather, VerifyReduceScatter and VerifyTraining.
std::vector<Input> AllGatherSequences(ProgramCache* cache, LandingModel model);
// One node; they end with a refresh.
std::vector<Input> RefreshSequences(ProgramCache* cache, LandingModel model);
std::vector<Input> ReduceScatterSequences(ProgramCache* cache, LandingModel model);
std::vector<Input> TrainingSequences(ProgramCache* cache, LandingModel model);

}  // namespace tide::verify

#endif  // TIDE_VERIFY_SEQUENCE_H_
