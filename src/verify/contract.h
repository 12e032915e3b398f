// Compares what memory holds with what it must hold.
#ifndef TIDE_VERIFY_CONTRACT_H_
#define TIDE_VERIFY_CONTRACT_H_

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "verify/expressions.h"
#include "verify/input.h"

namespace tide::verify {

class Contract {
 public:
  explicit Contract(Expressions* expressions) : expressions_(*expressions) {}

  // What the caller puts there; not for kReduced.
  Value ValueOf(const Content& content);
  // Why `value` is not what byte `offset` of `content` must be; empty if it is.
  std::string Mismatch(const Content& content, int64_t offset, const Value& value);

 private:
  using Node = Expressions::Node;

  std::string ReducedMismatch(const Content& content, ExprId expr);
  std::string CheckReduction(const Content& content, ExprId expr) const;
  std::string CheckWave(const Content& content, size_t wave, ExprId expr) const;
  // The fp32 sum over one node: ranks in order, last the one that added them.
  std::string CheckPartial(const Content& content, int node, ExprId expr) const;
  bool IsGradient(const Content& content, ExprId expr, int rank) const;

  Expressions& expressions_;
  // (expression, destination rank, version, stored type) -> mismatch
  std::map<std::tuple<ExprId, int, int, DType>, std::string> checked_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_CONTRACT_H_
