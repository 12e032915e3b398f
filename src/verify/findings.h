// Collects what a verification has found.
#ifndef TIDE_VERIFY_FINDINGS_H_
#define TIDE_VERIFY_FINDINGS_H_

#include <utility>

#include "tide/verify.h"

namespace tide::verify {

class Findings {
 public:
  explicit Findings(int limit) : limit_(limit) {}

  void Add(Finding finding) {
    if (!full()) result_.findings.push_back(std::move(finding));
  }
  bool empty() const { return result_.findings.empty(); }
  bool full() const { return static_cast<int>(result_.findings.size()) >= limit_; }
  VerifyStats& stats() { return result_.stats; }
  VerifyResult Take() { return std::move(result_); }

 private:
  const int limit_;
  VerifyResult result_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_FINDINGS_H_
