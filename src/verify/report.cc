#include <fmt/format.h>

#include <iterator>
#include <string>
#include <utility>

#include "tide/verify.h"

namespace tide {

const char* Name(FindingKind kind) {
  static constexpr const char* kNames[] = {"malformed",  "out of bounds",  "unbalanced counter",
                                           "stuck",      "ambiguous wait", "race",
                                           "wrong value"};
  return kNames[static_cast<size_t>(kind)];
}

void VerifyResult::Add(VerifyResult other) {
  findings.insert(findings.end(), std::make_move_iterator(other.findings.begin()),
                  std::make_move_iterator(other.findings.end()));
  stats.sequences += other.stats.sequences;
  stats.calls += other.stats.calls;
  stats.operations += other.stats.operations;
  stats.accesses += other.stats.accesses;
  stats.pairs += other.stats.pairs;
}

namespace {

// Runs of blanks in a program's text align columns; here they would only tear the line apart.
std::string Squeeze(const std::string& text) {
  std::string squeezed;
  for (const char c : text) {
    if (c != ' ' || (!squeezed.empty() && squeezed.back() != ' ')) squeezed += c;
  }
  return squeezed;
}

std::string ToString(const Site& site) {
  return fmt::format("call {}, rank {}: {}", site.call, site.rank, Squeeze(site.operation));
}

}  // namespace

std::string ToText(const Finding& finding) {
  std::string text = fmt::format("{}: {}\n", Name(finding.kind), finding.detail);
  if (finding.first.rank >= 0) text += fmt::format("  {}\n", ToString(finding.first));
  if (finding.second.rank >= 0) text += fmt::format("  {}\n", ToString(finding.second));
  if (!finding.region.empty()) {
    text += fmt::format("  at bytes [{}, {}) of {}\n", finding.begin, finding.end, finding.region);
  }
  return text;
}

std::string ToText(const VerifyResult& result) {
  std::string text;
  for (const Finding& finding : result.findings) text += ToText(finding);
  const VerifyStats& stats = result.stats;
  return text +
         fmt::format("{}: {} sequences, {} calls, {} operations, {} accesses, {} ordered pairs\n",
                     result.ok() ? "safe" : fmt::format("{} findings", result.findings.size()),
                     stats.sequences, stats.calls, stats.operations, stats.accesses, stats.pairs);
}

}  // namespace tide
