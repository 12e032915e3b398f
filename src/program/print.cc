#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tide/program.h"

namespace tide {

const char* Name(OpKind kind) {
  static constexpr const char* kNames[] = {"copy",    "multicast", "put",    "cast",
                                           "refresh", "sum",       "land",   "zero",
                                           "signal",  "wait",      "record", "await"};
  return kNames[static_cast<size_t>(kind)];
}

const char* Name(BufferKind kind) {
  static constexpr const char* kNames[] = {"shard",    "resident",    "landing", "stage",
                                           "gradient", "staging",     "outbox",  "spare",
                                           "inbox",    "accumulator", "output"};
  return kNames[static_cast<size_t>(kind)];
}

const char* Name(CounterKind kind) {
  static constexpr const char* kNames[kCounterKinds] = {
      "entry",  "landed",   "head",   "arrived", "confirmed",   "credit",
      "filled", "released", "placed", "reduced", "outbox_free", "spare_free"};
  return kNames[static_cast<size_t>(kind)];
}

const char* Name(EventKind kind) {
  static constexpr const char* kNames[] = {"ready", "gate", "read_done", "done", "local"};
  return kNames[static_cast<size_t>(kind)];
}

const char* Name(Lane lane) {
  static constexpr const char* kNames[kLanes] = {"control", "all_gather", "reduce_scatter"};
  return kNames[static_cast<size_t>(lane)];
}

std::string ToString(const Buffer& buffer) {
  switch (buffer.kind) {
    case BufferKind::kShard:
    case BufferKind::kGradient:
    case BufferKind::kStaging:
    case BufferKind::kOutbox:
    case BufferKind::kSpare:
    case BufferKind::kInbox:
      return fmt::format("{}[{}]", Name(buffer.kind), buffer.index);
    default:
      return Name(buffer.kind);
  }
}

std::string ToString(const Counter& counter) {
  const std::string index = counter.index > 0 ? fmt::format("[{}]", counter.index) : std::string();
  return fmt::format("{}{} of rank {}", Name(counter.kind), index, counter.producer);
}

std::string ToString(const Event& event) {
  return event.kind == EventKind::kLocal ? fmt::format("local {}", event.index) : Name(event.kind);
}

namespace {

int64_t Bytes(const std::vector<Piece>& pieces) {
  int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.rows * piece.row_bytes;
  return bytes;
}

template <typename Pieces>
int64_t Elems(const Pieces& pieces) {
  int64_t elems = 0;
  for (const auto& piece : pieces) elems += piece.elems;
  return elems;
}

nlohmann::json Json(const Program& program, Ref ref) {
  return {{"buffer", ToString(program.buffers[static_cast<size_t>(ref.buffer)])},
          {"offset", ref.offset}};
}

nlohmann::json Json(const Program& program, const Operation& op) {
  nlohmann::json json = {{"op", Name(op.kind)},
                         {"queue", program.queues[static_cast<size_t>(op.queue)]}};
  if (op.peer >= 0) json["peer"] = op.peer;
  for (const Piece& p : op.pieces) {
    json["pieces"].push_back({{"dst", Json(program, p.dst)},
                              {"src", Json(program, p.src)},
                              {"rows", p.rows},
                              {"row_bytes", p.row_bytes},
                              {"dst_pitch", p.dst_pitch},
                              {"src_pitch", p.src_pitch}});
  }
  for (const PutPiece& p : op.puts) {
    json["pieces"].push_back({{"dst", Json(program, p.dst)},
                              {"src", Json(program, p.src)},
                              {"bytes", p.bytes},
                              {"context", p.context},
                              {"signal", Name(p.signal)},
                              {"signal_index", p.signal_index}});
  }
  for (const LandPiece& p : op.lands) {
    json["pieces"].push_back({{"dst", Json(program, p.dst)},
                              {"block", Json(program, p.block)},
                              {"locals", p.locals},
                              {"elems", p.elems}});
  }
  for (const CastPiece& p : op.casts) {
    json["pieces"].push_back({{"dst", Json(program, p.dst)},
                              {"src", Json(program, p.src)},
                              {"elems", p.elems},
                              {"from", Name(p.src_dtype)},
                              {"to", Name(p.dst_dtype)}});
  }
  for (const SumPiece& p : op.sums) {
    nlohmann::json sources = nlohmann::json::array();
    for (const Ref& source : p.sources) sources.push_back(Json(program, source));
    json["pieces"].push_back({{"dst", Json(program, p.dst)},
                              {"sources", sources},
                              {"elems", p.elems},
                              {"from", Name(p.src_dtype)},
                              {"to", Name(p.dst_dtype)}});
  }
  if (op.kind == OpKind::kMulticast) json["span"] = op.span == Span::kNode ? "node" : "peers";
  if (op.kind == OpKind::kSum || op.kind == OpKind::kLand) json["accumulate"] = op.accumulate;
  if (op.kind == OpKind::kSum) json["scaled"] = op.scaled;
  if (op.kind == OpKind::kSignal || op.kind == OpKind::kWait) {
    json["counter"] = Name(op.counter.kind);
    json["producer"] = op.counter.producer;
    json["index"] = op.counter.index;
    json["sync"] = op.sync == Sync::kSafety ? "safety" : "pacing";
  }
  if (op.kind == OpKind::kWait) json["value"] = op.value;
  if (op.kind == OpKind::kRecord || op.kind == OpKind::kAwait) json["event"] = ToString(op.event);
  return json;
}

}  // namespace

std::string ToString(const Program& program, const Operation& op) {
  std::string head =
      fmt::format("{:<8} {:<9}", program.queues[static_cast<size_t>(op.queue)], Name(op.kind));
  switch (op.kind) {
    case OpKind::kCopy:
    case OpKind::kMulticast:
    case OpKind::kZero: {
      const std::string target = op.kind == OpKind::kCopy   ? fmt::format("rank {}", op.peer)
                                 : op.kind == OpKind::kZero ? std::string("own memory")
                                 : op.span == Span::kNode   ? std::string("node")
                                                            : std::string("peers");
      return fmt::format("{} {} pieces, {} bytes to {}", head, op.pieces.size(), Bytes(op.pieces),
                         target);
    }
    case OpKind::kPut: {
      int64_t bytes = 0;
      for (const PutPiece& piece : op.puts) bytes += piece.bytes;
      return fmt::format("{} {} pieces, {} bytes to rank {}", head, op.puts.size(), bytes, op.peer);
    }
    case OpKind::kLand:
      return fmt::format("{} {} pieces, {} elements{}", head, op.lands.size(), Elems(op.lands),
                         op.accumulate ? ", accumulating" : "");
    case OpKind::kCast:
    case OpKind::kRefresh:
      return fmt::format("{} {} pieces, {} elements", head, op.casts.size(), Elems(op.casts));
    case OpKind::kSum:
      return fmt::format("{} {} pieces, {} elements{}", head, op.sums.size(), Elems(op.sums),
                         op.accumulate ? ", accumulating" : "");
    case OpKind::kSignal:
      return fmt::format("{} {} on rank {}", head, ToString(op.counter), op.peer);
    case OpKind::kWait:
      return fmt::format("{} {} >= +{}", head, ToString(op.counter), op.value);
    case OpKind::kRecord:
    case OpKind::kAwait:
      return fmt::format("{} {}", head, ToString(op.event));
  }
  return head;
}

std::string ToText(const Program& program) {
  std::string text = fmt::format("{} of rank {} ({} x {})\n", program.name, program.rank,
                                 program.topology.nodes, program.topology.local_ranks);
  for (const Operation& op : program.operations) text += "  " + ToString(program, op) + "\n";
  return text;
}

std::string ToJson(const Program& program) {
  nlohmann::json json = {{"name", program.name},
                         {"lane", Name(program.lane)},
                         {"rank", program.rank},
                         {"nodes", program.topology.nodes},
                         {"local_ranks", program.topology.local_ranks}};
  for (const Buffer& buffer : program.buffers) {
    json["buffers"].push_back({{"name", ToString(buffer)}, {"bytes", buffer.bytes}});
  }
  for (const Operation& op : program.operations) json["operations"].push_back(Json(program, op));
  for (const Increment& inc : program.increments) {
    json["increments"].push_back({{"counter", Name(inc.counter.kind)},
                                  {"producer", inc.counter.producer},
                                  {"index", inc.counter.index},
                                  {"value", inc.value}});
  }
  return json.dump(1);
}

}  // namespace tide
