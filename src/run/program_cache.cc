#include "run/program_cache.h"

#include <algorithm>

namespace tide::internal {
namespace {

std::pair<int64_t, int64_t> FamilyOf(const std::vector<int64_t>& key) {
  return {key[0], key.size() > 1 ? key[1] : 0};
}

}  // namespace

const PlannedProgram* ProgramCache::Find(const std::vector<int64_t>& key) {
  const auto family = families_.find(FamilyOf(key));
  if (family == families_.end()) return nullptr;
  const auto found = family->second.find(key);
  if (found == family->second.end()) return nullptr;
  found->second.used = ++uses_;
  return &found->second.program;
}

const PlannedProgram& ProgramCache::Add(const std::vector<int64_t>& key, PlannedProgram program) {
  Family& family = families_[FamilyOf(key)];
  if (family.size() == kMostVariants) {
    family.erase(std::min_element(family.begin(), family.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    }));
  }
  Entry& entry = family[key];
  entry = {std::move(program), ++uses_};
  return entry.program;
}

}  // namespace tide::internal
