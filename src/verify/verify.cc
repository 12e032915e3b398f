#include <fmt/format.h>

#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "verify/checker.h"
#include "verify/findings.h"
#include "verify/input.h"
#include "verify/model.h"
#include "verify/simulate.h"
#include "verify/structure.h"

namespace tide::verify {
namespace {

void ReportStuck(const Model& model, const std::vector<int>& blocked, const std::string& schedule,
                 Findings* findings) {
  for (const int index : blocked) {
    const Step& step = model.steps()[static_cast<size_t>(index)];
    Finding finding;
    finding.kind = FindingKind::kStuck;
    finding.first = model.SiteOf(step);
    finding.detail = "waits for ever " + schedule;
    findings->Add(std::move(finding));
  }
}

void CheckProgress(const Model& model, const std::function<void()>& check_interrupt,
                   Findings* findings) {
  const auto ignore = [](const Step&) {};
  auto blocked = Simulation(model, model.Queues(), /*pacing=*/true).Run(ignore, check_interrupt);
  ReportStuck(model, blocked, "with queues of their own", findings);
  if (!blocked.empty()) return;
  blocked = Simulation(model, model.Fifos(), /*pacing=*/true).Run(ignore, check_interrupt);
  ReportStuck(model, blocked, "with the rank's queues in one FIFO", findings);
}

}  // namespace

VerifyResult Verify(const Input& input, const VerifyOptions& options) {
  Findings findings(options.max_findings);
  findings.stats().sequences = 1;
  findings.stats().calls = static_cast<int64_t>(input.calls.size());
  if (!CheckStructure(input, &findings) || findings.full()) return findings.Take();

  const Model model(input);
  findings.stats().operations = static_cast<int64_t>(model.steps().size());
  CheckProgress(model, options.check_interrupt, &findings);
  if (findings.full()) return findings.Take();
  // What is ordered without pacing is ordered with it: one schedule answers for both.
  const bool was_stuck = !findings.empty();
  const auto blocked = Checker(model, &findings).Run(options.check_interrupt);
  if (!was_stuck) ReportStuck(model, blocked, "with all pacing removed", &findings);
  return findings.Take();
}

}  // namespace tide::verify
