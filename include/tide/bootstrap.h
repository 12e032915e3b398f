// How ranks find each other before they share memory.
//
// The caller already has a way to exchange bytes (a process group, a store, threads of one
// process); TIDE builds everything else on it. Used at set-up only, never by a collective.
#ifndef TIDE_BOOTSTRAP_H_
#define TIDE_BOOTSTRAP_H_

#include <string>
#include <vector>

namespace tide {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;
  // Collective. Returns what every rank gave, in rank order. Throws if a rank does not come in
  // time.
  virtual std::vector<std::string> AllGather(const std::string& mine) = 0;
};

}  // namespace tide

#endif  // TIDE_BOOTSTRAP_H_
