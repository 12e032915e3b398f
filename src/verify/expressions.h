// What memory holds, symbolically: elements of hash-consed expressions.
//
// An expression says how an element came about (this rank's gradient, a sum in this order, scaled,
// rounded); a value adds which element of which parameter. So an interval of any length is one
// value, and equal histories have equal numbers.
#ifndef TIDE_VERIFY_EXPRESSIONS_H_
#define TIDE_VERIFY_EXPRESSIONS_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "verify/input.h"

namespace tide::verify {

using ExprId = uint32_t;
inline constexpr ExprId kStaleExpr = 0;
inline constexpr ExprId kZeroExpr = 1;
inline constexpr ExprId kWrongExpr = 2;  // follows from something that has been reported

// Byte `b` of an interval is byte (origin + b) of the parameter's elements, stored as `dtype`.
struct Value {
  ExprId expr = kStaleExpr;
  int param = 0;
  int64_t origin = 0;
  DType dtype = DType::kF32;

  // Stale, zero and wrong bytes are all alike.
  bool uniform() const { return expr <= kWrongExpr; }
  Value After(int64_t bytes) const;
  // The value of the bytes that follow `bytes` bytes of this one.
  bool Continues(const Value& before, int64_t bytes) const;
  bool operator==(const Value&) const = default;
};

inline Value Uniform(ExprId expr) { return {expr, 0, 0, DType::kU8}; }

class Expressions {
 public:
  enum class Kind : uint8_t { kUniform, kLeaf, kSum, kScale, kAdd, kRound };
  struct Node {
    Kind kind = Kind::kUniform;
    ContentKind leaf = ContentKind::kStale;
    DType dtype = DType::kF32;  // values need no more precision than this
    int rank = -1;              // kLeaf: whose; kSum: who added
    int version = 0;
    std::vector<ExprId> children;
  };

  Expressions();
  ExprId Leaf(ContentKind kind, int rank, int version, DType dtype);
  // In fp32, in order. One operand is itself.
  ExprId Sum(int rank, std::vector<ExprId> operands);
  ExprId Scale(ExprId operand);
  ExprId Add(ExprId to, ExprId operand);
  // Nothing if the operand needs no more precision than `dtype`.
  ExprId Round(ExprId operand, DType dtype);

  const Node& node(ExprId expr) const { return nodes_[expr]; }
  std::string ToString(ExprId expr) const;
  std::string ToString(const Value& value) const;

 private:
  ExprId Intern(Node node);

  std::vector<Node> nodes_;
  std::unordered_multimap<uint64_t, ExprId> index_;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_EXPRESSIONS_H_
