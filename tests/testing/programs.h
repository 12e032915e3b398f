// Programs written by hand.
#ifndef TIDE_TESTS_TESTING_PROGRAMS_H_
#define TIDE_TESTS_TESTING_PROGRAMS_H_

#include <vector>

#include "plan/builder.h"
#include "tide/program.h"

namespace tide::testing {

// The programs of all ranks, each written by `write(builder)`.
template <typename Write>
std::vector<Program> WriteAll(const Topology& topology, const Write& write) {
  std::vector<Program> programs;
  for (int rank = 0; rank < topology.Ranks(); ++rank) {
    internal::Builder builder("handmade", Lane::kReduceScatter, topology, rank);
    write(builder);
    programs.push_back(builder.Finish());
  }
  return programs;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_PROGRAMS_H_
