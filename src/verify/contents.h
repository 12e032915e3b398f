// What the caller puts into shards and gradients, and what it expects in landings and outputs.
#ifndef TIDE_VERIFY_CONTENTS_H_
#define TIDE_VERIFY_CONTENTS_H_

#include <memory>
#include <vector>

#include "verify/input.h"

namespace tide::verify {

using Places = std::map<std::pair<BufferKind, int>, Place>;

// All-gather: every rank's own shards, where the program reads them: one buffer a parameter, or
// packed in the resident region, each aligned to kStagingAlignment.
std::vector<Content> ShardContents(const VerifyGroup& group, const Program& program,
                                   const Places& places, int call);
// Shard (p, r) at base_p + r * s_p, padding rows as stored (GroupLayout).
std::vector<Content> LandingContents(const GroupLayout& layout,
                                     const std::vector<DType>& shard_dtypes, Place landing,
                                     int call);

// Reduce-scatter: a rank's gradients; and its output before and after the call, the live rows of
// the participants' shards one after the other, padding rows zero.
std::vector<Content> GradientContents(const VerifyGroup& group, const Places& places, int rank,
                                      int call);
std::vector<Content> OldOutputContents(const VerifyGroup& group, Place output, int rank, int call);
std::vector<Content> ReducedContents(const VerifyGroup& group, Place output, int rank, int call,
                                     const std::shared_ptr<const Reduction>& reduction);

// Waves of contributors 1..M; width 0: L, or 8 with one rank a node.
std::vector<std::vector<int>> ContributorWaves(const Topology& topology, int width);

// The same places, holding garbage: freed.
std::vector<Content> Freed(std::vector<Content> contents);

}  // namespace tide::verify

#endif  // TIDE_VERIFY_CONTENTS_H_
