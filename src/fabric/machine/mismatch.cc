#include "fabric/machine/mismatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace tide::machine {
namespace {

bool TakesPart(const CallIdentity& call, int param) {
  return (call.takes_part[param / 64] >> (param % 64) & 1) != 0;
}

// "'weight', 'bias'": the parameters that `has` hands in and `lacks` does not.
std::string OnlyIn(const GroupLayout& layout, const CallIdentity& has, const CallIdentity& lacks) {
  std::string names;
  const int count =
      std::min({has.params, lacks.params, kNamedParams, static_cast<int>(layout.params().size())});
  for (int p = 0; p < count; ++p) {
    if (!TakesPart(has, p) || TakesPart(lacks, p)) continue;
    if (!names.empty()) names += ", ";
    names += "'" + layout.params()[static_cast<size_t>(p)].shape.name + "'";
  }
  return names;
}

bool Is(std::string_view collective, const CallIdentity& call) {
  return std::string_view(call.text).starts_with(collective);
}

}  // namespace

std::string DescribeMismatch(const CallIdentity& ours, int rank, const CallIdentity& theirs,
                             int peer, const GroupLayout* layout) {
  // Lower rank first, so that both ranks say the same sentence.
  const bool first = rank < peer;
  const CallIdentity& a = first ? ours : theirs;
  const CallIdentity& b = first ? theirs : ours;
  const int rank_a = std::min(rank, peer);
  const int rank_b = std::max(rank, peer);
  std::string text = fmt::format("call {}: rank {} entered {}, rank {} entered {}", ours.sequence,
                                 rank_a, a.text, rank_b, b.text);
  if (layout == nullptr || ours.group != theirs.group) {
    return text + "; expected the same calls in the same order on every rank";
  }
  // The adapter refreshes unless version counters tell of a change; see kept_landings.py.
  const bool b_gathers = Is("refreshing all_gather", a) && Is("all_gather", b);
  if (b_gathers || (Is("all_gather", a) && Is("refreshing all_gather", b))) {
    return text + fmt::format(
                      "; only rank {} gathers what its forward has gathered already, for example "
                      "because it has changed an unsharded parameter in place: do so on every rank "
                      "or on none, or set TIDE_KEEP_LANDINGS=off",
                      b_gathers ? rank_b : rank_a);
  }
  const std::string only_a = OnlyIn(*layout, a, b);
  const std::string only_b = OnlyIn(*layout, b, a);
  if (only_a.empty() && only_b.empty()) {
    return text +
           "; their shapes, dtypes, landing, output, scale or options differ; expected the same "
           "arguments and TIDE_* variables on every rank";
  }
  if (!only_a.empty()) text += fmt::format("; only rank {} has a gradient of {}", rank_a, only_a);
  if (!only_b.empty()) text += fmt::format("; only rank {} has a gradient of {}", rank_b, only_b);
  return text +
         "; expected the same parameters on every rank: use every parameter on every rank or call "
         "set_reduce_scatter_unused_params(True) on the module";
}

}  // namespace tide::machine
