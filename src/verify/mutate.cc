#include "verify/mutate.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "tide/error.h"
#include "verify/checker.h"
#include "verify/findings.h"
#include "verify/model.h"

namespace tide::verify {
namespace {

// Puts programs into a sequence and takes them out again.
class Graft {
 public:
  Graft(Input* input, const Programs& originals, const Mutant& mutant) : input_(*input) {
    for (const Program& program : mutant.programs) {
      const auto replacement = std::make_shared<const Program>(program);
      const auto rank = static_cast<size_t>(program.rank);
      for (Call& call : input_.calls) {
        if (call.programs[rank] != originals[rank]) continue;
        undo_.emplace_back(&call.programs[rank], call.programs[rank]);
        call.programs[rank] = replacement;
      }
    }
  }
  ~Graft() {
    for (auto& [where, program] : undo_) *where = program;
    input_.issue_order.clear();
  }
  Graft(const Graft&) = delete;
  Graft& operator=(const Graft&) = delete;

  // One rank issues the first two checked calls of a lane the other way round.
  bool SwapCalls(int rank) {
    std::vector<int> order(input_.calls.size());
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = 0; i + 1 < order.size(); ++i) {
      const Call& first = input_.calls[i];
      const Call& second = input_.calls[i + 1];
      if (first.predecessor || second.predecessor ||
          first.programs[0]->lane != second.programs[0]->lane) {
        continue;
      }
      std::swap(order[i], order[i + 1]);
      input_.issue_order.assign(static_cast<size_t>(input_.topology.Ranks()), {});
      input_.issue_order[static_cast<size_t>(rank)] = std::move(order);
      return true;
    }
    return false;
  }
  bool empty() const { return undo_.empty(); }

 private:
  Input& input_;
  std::vector<std::pair<std::shared_ptr<const Program>*, std::shared_ptr<const Program>>> undo_;
};

bool Detected(std::vector<Input>* sequences, const Programs& originals, const Mutant& mutant,
              int rank, const VerifyOptions& options) {
  return std::any_of(sequences->begin(), sequences->end(), [&](Input& input) {
    Graft graft(&input, originals, mutant);
    const bool changed =
        mutant.kind == MutantKind::kSwappedCalls ? graft.SwapCalls(rank) : !graft.empty();
    return changed && !Verify(input, options).ok();
  });
}

bool Relaxes(MutantKind kind) {
  return kind == MutantKind::kDroppedWait || kind == MutantKind::kWeakenedWait ||
         kind == MutantKind::kDroppedAwait || kind == MutantKind::kDroppedPair;
}

// Which step makes the relaxed one redundant: empty if one of the checked calls has none, nothing
// if the relaxed step never waits in this sequence.
std::optional<std::string> ExplainIn(const Input& input, const Operation& op, int rank,
                                     bool weakened, const std::function<void()>& check_interrupt) {
  const Model model(input);
  std::optional<std::string> explanation;
  for (const Step& step : model.steps()) {
    const bool checked = !input.calls[static_cast<size_t>(step.call)].predecessor;
    const bool waits = op.kind == OpKind::kAwait || step.target > 0;
    if (step.op != &op || step.rank != rank || !checked || !waits) continue;
    Findings ignored(0);
    Checker checker(model, &ignored, {&step, weakened});
    checker.Run(check_interrupt);
    if (checker.substitute() == nullptr) return std::string();
    const Site site = model.SiteOf(*checker.substitute());
    explanation = site.call == step.call ? site.operation
                                         : fmt::format("{} of call {}, before call {}",
                                                       site.operation, site.call, step.call);
  }
  return explanation;
}

// Why a mutant that is not detected does no harm: before the queue does anything else, another wait
// has told it as much.
std::string Explain(const std::vector<Input>& sequences, const Programs& originals,
                    const Mutant& mutant, int rank, const std::function<void()>& check_interrupt) {
  if (!Relaxes(mutant.kind) || mutant.operation < 0) return {};
  const auto r = static_cast<size_t>(rank);
  const Operation& op = originals[r]->operations[static_cast<size_t>(mutant.operation)];
  std::string first;
  for (const Input& input : sequences) {
    const auto explanation =
        ExplainIn(input, op, rank, mutant.kind == MutantKind::kWeakenedWait, check_interrupt);
    if (!explanation.has_value()) continue;
    if (explanation->empty()) return {};
    if (first.empty()) first = *explanation;
  }
  return first;
}

}  // namespace

bool MutationTable::ok() const {
  return std::all_of(rows.begin(), rows.end(),
                     [](const MutationRow& row) { return row.undetected.empty(); });
}

void MutationTable::Add(const MutationTable& other) {
  for (size_t kind = 0; kind < rows.size(); ++kind) {
    MutationRow& row = rows[kind];
    const MutationRow& added = other.rows[kind];
    row.injected += added.injected;
    row.detected += added.detected;
    row.explained.insert(row.explained.end(), added.explained.begin(), added.explained.end());
    row.undetected.insert(row.undetected.end(), added.undetected.begin(), added.undetected.end());
  }
}

MutationTable RunMutation(std::vector<Input> sequences, const std::vector<int>& ranks,
                          const VerifyOptions& options) {
  VerifyOptions first_only = options;
  first_only.max_findings = 1;
  TIDE_CHECK(!sequences.empty() && !sequences[0].calls.empty());
  for (const Input& input : sequences) {
    const VerifyResult result = Verify(input, first_only);
    if (result.ok()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("mutation: expected safe sequences, but '{}' is not:\n{}", input.name,
                            ToText(result)));
  }
  const Programs originals = sequences[0].calls.back().programs;
  MutationTable table;
  for (const int rank : ranks) {
    for (const Mutant& mutant : MakeMutants(originals, rank)) {
      MutationRow& row = table.rows[static_cast<size_t>(mutant.kind)];
      ++row.injected;
      if (Detected(&sequences, originals, mutant, rank, first_only)) {
        ++row.detected;
        continue;
      }
      const std::string substitute =
          Explain(sequences, originals, mutant, rank, options.check_interrupt);
      if (substitute.empty()) {
        row.undetected.push_back(mutant.description);
      } else {
        row.explained.push_back(
            fmt::format("{}; the same order comes with: {}", mutant.description, substitute));
      }
    }
  }
  return table;
}

std::string ToText(const MutationTable& table) {
  std::string text = fmt::format("{:<22} {:>9} {:>9} {:>9} {:>10}\n", "fault", "injected",
                                 "detected", "explained", "undetected");
  for (size_t kind = 0; kind < table.rows.size(); ++kind) {
    const MutationRow& row = table.rows[kind];
    text += fmt::format("{:<22} {:>9} {:>9} {:>9} {:>10}\n", Name(static_cast<MutantKind>(kind)),
                        row.injected, row.detected, row.explained.size(), row.undetected.size());
  }
  for (size_t kind = 0; kind < table.rows.size(); ++kind) {
    const char* name = Name(static_cast<MutantKind>(kind));
    for (const std::string& mutant : table.rows[kind].explained) {
      text += fmt::format("explained, {}: {}\n", name, mutant);
    }
    for (const std::string& mutant : table.rows[kind].undetected) {
      text += fmt::format("UNDETECTED, {}: {}\n", name, mutant);
    }
  }
  return text;
}

}  // namespace tide::verify
