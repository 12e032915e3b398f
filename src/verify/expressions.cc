#include "verify/expressions.h"

#include <fmt/format.h>

#include <utility>

namespace tide::verify {

Value Value::After(int64_t bytes) const {
  Value after = *this;
  if (!uniform()) after.origin += bytes;
  return after;
}

bool Value::Continues(const Value& before, int64_t bytes) const {
  return *this == before.After(bytes);
}

Expressions::Expressions() : nodes_(3) {}

ExprId Expressions::Leaf(ContentKind kind, int rank, int version, DType dtype) {
  return Intern({Kind::kLeaf, kind, dtype, rank, version, {}});
}

ExprId Expressions::Sum(int rank, std::vector<ExprId> operands) {
  if (operands.size() == 1) return operands[0];
  return Intern({Kind::kSum, ContentKind::kStale, DType::kF32, rank, 0, std::move(operands)});
}

ExprId Expressions::Scale(ExprId operand) {
  return Intern({Kind::kScale, ContentKind::kStale, DType::kF32, -1, 0, {operand}});
}

ExprId Expressions::Add(ExprId to, ExprId operand) {
  return Intern({Kind::kAdd, ContentKind::kStale, DType::kF32, -1, 0, {to, operand}});
}

ExprId Expressions::Round(ExprId operand, DType dtype) {
  // Every 16-bit float is an fp32 number.
  if (dtype == DType::kF32 || nodes_[operand].dtype == dtype || operand <= kWrongExpr) {
    return operand;
  }
  return Intern({Kind::kRound, ContentKind::kStale, dtype, -1, 0, {operand}});
}

ExprId Expressions::Intern(Node node) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&hash](uint64_t word) { hash = (hash ^ word) * 0x9e3779b97f4a7c15 + 1; };
  mix(static_cast<uint64_t>(node.kind) << 16 | static_cast<uint64_t>(node.leaf) << 8 |
      static_cast<uint64_t>(node.dtype));
  mix(static_cast<uint64_t>(node.rank) << 32 ^ static_cast<uint64_t>(node.version));
  for (const ExprId child : node.children) mix(child);
  const auto [begin, end] = index_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Node& known = nodes_[it->second];
    if (known.kind == node.kind && known.leaf == node.leaf && known.dtype == node.dtype &&
        known.rank == node.rank && known.version == node.version &&
        known.children == node.children) {
      return it->second;
    }
  }
  const auto expr = static_cast<ExprId>(nodes_.size());
  nodes_.push_back(std::move(node));
  index_.emplace(hash, expr);
  return expr;
}

std::string Expressions::ToString(ExprId expr) const {
  if (expr == kStaleExpr) return "garbage";
  if (expr == kZeroExpr) return "zero";
  if (expr == kWrongExpr) return "a wrong value";
  const Node& node = nodes_[expr];
  switch (node.kind) {
    case Kind::kLeaf: {
      const char* of = node.leaf == ContentKind::kShard      ? "shard"
                       : node.leaf == ContentKind::kGradient ? "gradient"
                                                             : "old output";
      return fmt::format("{} of rank {} (call {})", of, node.rank, node.version);
    }
    case Kind::kSum: {
      std::string text = "(";
      for (size_t i = 0; i < node.children.size(); ++i) {
        text += (i > 0 ? " + " : "") + ToString(node.children[i]);
      }
      return text + ")";
    }
    case Kind::kScale:
      return "scale * " + ToString(node.children[0]);
    case Kind::kAdd:
      return fmt::format("[{} + {}]", ToString(node.children[0]), ToString(node.children[1]));
    case Kind::kRound:
      return fmt::format("{}({})", tide::Name(node.dtype), ToString(node.children[0]));
    case Kind::kUniform:
      break;
  }
  return "?";
}

std::string Expressions::ToString(const Value& value) const {
  if (value.uniform()) return ToString(value.expr);
  return fmt::format("element {} of parameter {}, as {}, of {}",
                     value.origin / static_cast<int64_t>(ItemSize(value.dtype)), value.param,
                     tide::Name(value.dtype), ToString(value.expr));
}

}  // namespace tide::verify
