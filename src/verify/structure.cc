#include "verify/structure.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace tide::verify {
namespace {

bool HasIndex(size_t size, int index) { return index >= 0 && static_cast<size_t>(index) < size; }

// What one rank does with one counter of another, or of its own.
using CounterKey = std::tuple<int, Lane, CounterKind, int, int>;  // rank, ..., producer, index

struct CounterUse {
  int64_t declared = 0;
  int64_t produced = 0;
  std::set<std::string> producing;  // queues
  std::set<std::string> waiting;
};

class Structure {
 public:
  Structure(const Input& input, Findings* findings) : input_(input), findings_(*findings) {}

  bool Check() {
    for (size_t call = 0; call < input_.calls.size(); ++call) {
      call_ = static_cast<int>(call);
      if (!CheckCall()) return false;
      CheckIncrements();
    }
    CheckCounterQueues();
    return sound_;
  }

 private:
  bool CheckCall();
  void CheckProgram();
  void CheckOperation(const Operation& op);
  void CheckData(const Operation& op);
  void CheckEvents();
  void CheckIncrements();
  void CheckCounterQueues();

  bool Peer(const Operation& op);
  void CheckRef(const Operation& op, Ref ref, int64_t bytes);
  void CheckRows(const Operation& op, Ref ref, const Piece& piece, int64_t pitch);
  void CheckSymmetric(const Operation& op, Ref ref);
  CounterUse* Use(const Operation& op, int rank, const Counter& counter);
  void Report(FindingKind kind, const Operation* op, std::string detail);

  const Input& input_;
  Findings& findings_;
  bool sound_ = true;
  int call_ = 0;
  const Program* program_ = nullptr;
  std::map<CounterKey, CounterUse> counters_;
};

void Structure::Report(FindingKind kind, const Operation* op, std::string detail) {
  if (kind != FindingKind::kUnbalanced) sound_ = false;
  Finding finding;
  finding.kind = kind;
  finding.first = {call_, program_->rank,
                   op != nullptr ? ToString(*program_, *op) : program_->name};
  finding.detail = std::move(detail);
  findings_.Add(std::move(finding));
}

bool Structure::CheckCall() {
  const Call& call = input_.calls[static_cast<size_t>(call_)];
  const auto ranks = static_cast<size_t>(input_.topology.Ranks());
  if (call.programs.size() != ranks) {
    Finding finding;
    finding.first.call = call_;
    finding.detail = fmt::format("expected {} programs, got {}", ranks, call.programs.size());
    findings_.Add(std::move(finding));
    return false;
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    program_ = call.programs[rank].get();
    const Topology& topology = program_->topology;
    if (program_->rank != static_cast<int>(rank) || topology.nodes != input_.topology.nodes ||
        topology.local_ranks != input_.topology.local_ranks) {
      Report(FindingKind::kMalformed, nullptr,
             fmt::format("expected the program of rank {} of {} x {}, got rank {} of {} x {}", rank,
                         input_.topology.nodes, input_.topology.local_ranks, program_->rank,
                         topology.nodes, topology.local_ranks));
      return false;
    }
    CheckProgram();
  }
  return sound_;
}

void Structure::CheckProgram() {
  const Call& call = input_.calls[static_cast<size_t>(call_)];
  for (const Buffer& buffer : program_->buffers) {
    if (buffer.bytes > 0 && call.places.count({buffer.kind, buffer.index}) == 0) {
      Report(FindingKind::kMalformed, nullptr, fmt::format("{} has no place", ToString(buffer)));
    }
  }
  for (const Operation& op : program_->operations) {
    if (!HasIndex(program_->queues.size(), op.queue)) {
      // Its text would need the queue's name.
      Report(FindingKind::kMalformed, nullptr,
             fmt::format("expected a queue below {}, got {}", program_->queues.size(), op.queue));
      continue;
    }
    CheckOperation(op);
  }
  CheckEvents();
}

bool Structure::Peer(const Operation& op) {
  if (!HasIndex(static_cast<size_t>(input_.topology.Ranks()), op.peer)) {
    Report(FindingKind::kMalformed, &op, fmt::format("rank {} does not exist", op.peer));
    return false;
  }
  const Topology& topology = input_.topology;
  const bool same_node = topology.Node(op.peer) == topology.Node(program_->rank);
  const bool same_rail = topology.Local(op.peer) == topology.Local(program_->rank);
  const bool reachable = op.kind == OpKind::kCopy  ? same_node
                         : op.kind == OpKind::kPut ? same_rail && !same_node
                                                   : same_node || same_rail;
  if (!reachable) {
    Report(FindingKind::kMalformed, &op,
           fmt::format("rank {} can't be reached: it is neither on this node nor on this rail",
                       op.peer));
  }
  return true;
}

void Structure::CheckOperation(const Operation& op) {
  const int rank = program_->rank;
  switch (op.kind) {
    case OpKind::kSignal:
      if (!Peer(op)) break;
      if (op.counter.producer != rank) {
        Report(
            FindingKind::kMalformed, &op,
            fmt::format("expected the producer to be rank {}, got {}", rank, op.counter.producer));
      }
      if (CounterUse* use = Use(op, op.peer, op.counter)) {
        ++use->produced;
        use->producing.insert(program_->queues[static_cast<size_t>(op.queue)]);
      }
      break;
    case OpKind::kWait:
      if (CounterUse* use = Use(op, rank, op.counter)) {
        use->waiting.insert(program_->queues[static_cast<size_t>(op.queue)]);
      }
      break;
    case OpKind::kPut:
      if (!Peer(op)) break;
      for (const PutPiece& put : op.puts) {
        CheckRef(op, put.dst, put.bytes);
        CheckRef(op, put.src, put.bytes);
        CheckSymmetric(op, put.dst);
        CheckSymmetric(op, put.src);
        if (CounterUse* use = Use(op, op.peer, {put.signal, rank, put.signal_index})) {
          ++use->produced;
          use->producing.insert(program_->queues[static_cast<size_t>(op.queue)]);
        }
      }
      break;
    default:
      CheckData(op);
  }
}

void Structure::CheckData(const Operation& op) {
  const bool copies = op.kind == OpKind::kCopy || op.kind == OpKind::kMulticast;
  if (op.kind == OpKind::kCopy && !Peer(op)) return;
  for (const Piece& piece : op.pieces) {
    CheckRows(op, piece.dst, piece, piece.dst_pitch);
    if (copies) CheckRows(op, piece.src, piece, piece.src_pitch);
    if (copies && op.peer != program_->rank) CheckSymmetric(op, piece.dst);
  }
  for (const CastPiece& piece : op.casts) {
    CheckRef(op, piece.dst, piece.elems * static_cast<int64_t>(ItemSize(piece.dst_dtype)));
    CheckRef(op, piece.src, piece.elems * static_cast<int64_t>(ItemSize(piece.src_dtype)));
    if (op.kind == OpKind::kRefresh) CheckSymmetric(op, piece.dst);
  }
  for (const SumPiece& piece : op.sums) {
    CheckRef(op, piece.dst, piece.elems * static_cast<int64_t>(ItemSize(piece.dst_dtype)));
    for (const Ref& source : piece.sources) {
      CheckRef(op, source, piece.elems * static_cast<int64_t>(ItemSize(piece.src_dtype)));
    }
    if (piece.sources.empty()) Report(FindingKind::kMalformed, &op, "a sum of nothing");
  }
  for (const LandPiece& piece : op.lands) {
    CheckRef(op, piece.dst, piece.elems * static_cast<int64_t>(ItemSize(piece.dst_dtype)));
    CheckRef(op, piece.block, piece.elems * static_cast<int64_t>(ItemSize(DType::kF32)));
    CheckSymmetric(op, piece.block);
    std::set<int> locals(piece.locals.begin(), piece.locals.end());
    const bool known = std::all_of(locals.begin(), locals.end(), [&](int local) {
      return HasIndex(static_cast<size_t>(input_.topology.local_ranks), local);
    });
    if (locals.empty() || locals.size() != piece.locals.size() || !known) {
      Report(FindingKind::kMalformed, &op, "expected distinct local ranks to land from");
    }
  }
}

void Structure::CheckRef(const Operation& op, Ref ref, int64_t bytes) {
  if (!HasIndex(program_->buffers.size(), ref.buffer)) {
    Report(FindingKind::kMalformed, &op,
           fmt::format("expected a buffer below {}, got {}", program_->buffers.size(), ref.buffer));
    return;
  }
  const Buffer& buffer = program_->buffers[static_cast<size_t>(ref.buffer)];
  if (ref.offset < 0 || bytes < 0 || ref.offset + bytes > buffer.bytes) {
    Report(FindingKind::kOutOfBounds, &op,
           fmt::format("bytes [{}, {}) of {}, which has {}", ref.offset, ref.offset + bytes,
                       ToString(buffer), buffer.bytes));
  }
}

void Structure::CheckRows(const Operation& op, Ref ref, const Piece& piece, int64_t pitch) {
  const bool backwards = piece.rows > 1 && pitch < 0;
  if (piece.rows < 0 || backwards) {
    Report(FindingKind::kMalformed, &op,
           fmt::format("expected rows and pitch >= 0, got {} and {}", piece.rows, pitch));
    return;
  }
  if (piece.rows == 0) return;
  CheckRef(op, ref, (piece.rows - 1) * (piece.rows > 1 ? pitch : 0) + piece.row_bytes);
}

void Structure::CheckSymmetric(const Operation& op, Ref ref) {
  if (!HasIndex(program_->buffers.size(), ref.buffer)) return;
  const Buffer& buffer = program_->buffers[static_cast<size_t>(ref.buffer)];
  if (buffer.symmetric()) return;
  Report(FindingKind::kMalformed, &op,
         fmt::format("{} is not symmetric: no other rank can reach it", ToString(buffer)));
}

CounterUse* Structure::Use(const Operation& op, int rank, const Counter& counter) {
  if (!HasIndex(static_cast<size_t>(input_.topology.Ranks()), counter.producer) ||
      !HasIndex(static_cast<size_t>(CounterIndices(counter.kind)), counter.index)) {
    Report(FindingKind::kMalformed, &op,
           fmt::format("there is no counter {} (indices are below {})", ToString(counter),
                       CounterIndices(counter.kind)));
    return nullptr;
  }
  return &counters_[{rank, program_->lane, counter.kind, counter.producer, counter.index}];
}

void Structure::CheckEvents() {
  std::map<std::pair<EventKind, int>, int> records;
  for (const Operation& op : program_->operations) {
    if (op.kind != OpKind::kRecord) continue;
    const bool of_caller = op.event.kind == EventKind::kReady || op.event.kind == EventKind::kGate;
    if (of_caller) Report(FindingKind::kMalformed, &op, "only the caller records this event");
    if (++records[{op.event.kind, op.event.index}] > 1) {
      Report(FindingKind::kMalformed, &op, "an event is recorded once a call");
    }
  }
  for (const Operation& op : program_->operations) {
    if (op.kind != OpKind::kAwait || op.event.kind == EventKind::kReady ||
        op.event.kind == EventKind::kGate) {
      continue;
    }
    if (records.count({op.event.kind, op.event.index}) == 0) {
      Report(FindingKind::kMalformed, &op, "nothing records this event");
    }
  }
}

void Structure::CheckIncrements() {
  for (const auto& program : input_.calls[static_cast<size_t>(call_)].programs) {
    program_ = program.get();
    for (const Increment& increment : program->increments) {
      counters_[{program->rank, program->lane, increment.counter.kind, increment.counter.producer,
                 increment.counter.index}]
          .declared += increment.value;
    }
  }
  for (auto& [key, use] : counters_) {
    if (use.declared != use.produced) {
      const auto& [rank, lane, kind, producer, index] = key;
      program_ = input_.calls[static_cast<size_t>(call_)].programs[static_cast<size_t>(rank)].get();
      Report(FindingKind::kUnbalanced, nullptr,
             fmt::format("counter {}: {} increments declared, {} produced",
                         ToString(Counter{kind, producer, index}), use.declared, use.produced));
    }
    use.declared = use.produced = 0;
  }
}

void Structure::CheckCounterQueues() {
  for (const auto& [key, use] : counters_) {
    const auto& [rank, lane, kind, producer, index] = key;
    if (use.producing.size() <= 1 && use.waiting.size() <= 1) continue;
    program_ = input_.calls.front().programs[static_cast<size_t>(rank)].get();
    Report(FindingKind::kMalformed, nullptr,
           fmt::format("counter {}: expected one producing and one waiting queue, got {} and {}",
                       ToString(Counter{kind, producer, index}), use.producing.size(),
                       use.waiting.size()));
  }
}

}  // namespace

bool CheckStructure(const Input& input, Findings* findings) {
  return Structure(input, findings).Check();
}

}  // namespace tide::verify
