#include "verify/contract.h"

#include <fmt/format.h>

#include <algorithm>

namespace tide::verify {

Value Contract::ValueOf(const Content& content) {
  if (content.kind == ContentKind::kStale) return Uniform(kStaleExpr);
  if (content.kind == ContentKind::kZero) return Uniform(kZeroExpr);
  const ExprId leaf =
      expressions_.Leaf(content.kind, content.rank, content.version, content.source_dtype);
  return {expressions_.Round(leaf, content.dtype), content.param,
          content.first_elem * static_cast<int64_t>(ItemSize(content.dtype)), content.dtype};
}

std::string Contract::Mismatch(const Content& content, int64_t offset, const Value& value) {
  if (content.kind != ContentKind::kReduced) {
    const Value expected = ValueOf(content).After(offset);
    if (value == expected) return {};
    return fmt::format("expected {}, holds {}", expressions_.ToString(expected),
                       expressions_.ToString(value));
  }
  const int64_t item = static_cast<int64_t>(ItemSize(content.dtype));
  const int64_t origin = content.first_elem * item + offset;
  if (value.uniform() || value.param != content.param || value.origin != origin ||
      value.dtype != content.dtype) {
    return fmt::format(
        "expected the sum of all gradients' element {} of parameter {}, as {}; holds {}",
        origin / item, content.param, tide::Name(content.dtype), expressions_.ToString(value));
  }
  return ReducedMismatch(content, value.expr);
}

std::string Contract::ReducedMismatch(const Content& content, ExprId expr) {
  const auto [found, added] =
      checked_.try_emplace({expr, content.rank, content.version, content.dtype});
  if (added) found->second = CheckReduction(content, expr);
  return found->second;
}

std::string Contract::CheckReduction(const Content& content, ExprId expr) const {
  const std::string whole = expressions_.ToString(expr);
  if (content.dtype != DType::kF32) {
    const Node& rounded = expressions_.node(expr);
    if (rounded.kind != Expressions::Kind::kRound || rounded.dtype != content.dtype) {
      return fmt::format("expected one rounding to {} at the end of {}", tide::Name(content.dtype),
                         whole);
    }
    expr = rounded.children[0];
  }
  std::vector<ExprId> terms;
  for (; expressions_.node(expr).kind == Expressions::Kind::kAdd;
       expr = expressions_.node(expr).children[0]) {
    terms.push_back(expressions_.node(expr).children[1]);
  }
  terms.push_back(expr);
  std::reverse(terms.begin(), terms.end());

  const Reduction& reduction = *content.reduction;
  if (reduction.accumulate) {
    const Node& old = expressions_.node(terms[0]);
    if (old.kind != Expressions::Kind::kLeaf || old.leaf != ContentKind::kOutput ||
        old.rank != content.rank || old.version != content.version) {
      return fmt::format("expected the old output as the first term of {}", whole);
    }
    terms.erase(terms.begin());
  }
  if (terms.size() != reduction.waves.size()) {
    return fmt::format("expected {} waves, got {} in {}", reduction.waves.size(), terms.size(),
                       whole);
  }
  for (size_t w = 0; w < terms.size(); ++w) {
    std::string mismatch = CheckWave(content, w, terms[w]);
    if (!mismatch.empty()) return fmt::format("wave {}: {} in {}", w, mismatch, whole);
  }
  return {};
}

std::string Contract::CheckWave(const Content& content, size_t wave, ExprId expr) const {
  if (expressions_.node(expr).kind != Expressions::Kind::kScale) {
    return fmt::format("expected scale * a sum, got {}", expressions_.ToString(expr));
  }
  expr = expressions_.node(expr).children[0];
  const Reduction& reduction = *content.reduction;
  const auto& contributors = reduction.waves[wave];
  std::vector<ExprId> partials = {expr};
  if (contributors.size() > 1) {
    if (expressions_.node(expr).kind != Expressions::Kind::kSum ||
        expressions_.node(expr).children.size() != contributors.size()) {
      return fmt::format("expected a sum of {} node partials, got {}", contributors.size(),
                         expressions_.ToString(expr));
    }
    partials = expressions_.node(expr).children;
  }
  const int nodes = reduction.topology.nodes;
  const int destination = reduction.topology.Node(content.rank);
  for (size_t i = 0; i < partials.size(); ++i) {
    const int node = ((destination - contributors[i]) % nodes + nodes) % nodes;
    std::string mismatch = CheckPartial(content, node, partials[i]);
    if (!mismatch.empty()) return fmt::format("contributor {}: {}", contributors[i], mismatch);
  }
  return {};
}

std::string Contract::CheckPartial(const Content& content, int node, ExprId expr) const {
  const Topology& topology = content.reduction->topology;
  if (topology.local_ranks == 1) {
    if (IsGradient(content, expr, topology.Rank(node, 0))) return {};
    return fmt::format("expected the gradient of rank {}, got {}", topology.Rank(node, 0),
                       expressions_.ToString(expr));
  }
  const Node& sum = expressions_.node(expr);
  std::vector<int> order;
  for (int local = 0; local < topology.local_ranks; ++local) {
    if (topology.Rank(node, local) != sum.rank) order.push_back(topology.Rank(node, local));
  }
  order.push_back(sum.rank);
  bool right = sum.kind == Expressions::Kind::kSum && topology.Node(sum.rank) == node &&
               sum.children.size() == order.size();
  for (size_t i = 0; right && i < order.size(); ++i) {
    right = IsGradient(content, sum.children[i], order[i]);
  }
  if (right) return {};
  return fmt::format(
      "expected the gradients of node {} in rank order, last that of the rank that "
      "adds them, got {}",
      node, expressions_.ToString(expr));
}

bool Contract::IsGradient(const Content& content, ExprId expr, int rank) const {
  const Node& node = expressions_.node(expr);
  return node.kind == Expressions::Kind::kLeaf && node.leaf == ContentKind::kGradient &&
         node.rank == rank && node.version == content.version;
}

}  // namespace tide::verify
