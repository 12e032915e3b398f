#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tide/program.h"

namespace tide {

const char* Name(OpKind kind) {
  switch (kind) {
    case OpKind::kCopy:
      return "copy";
    case OpKind::kMulticast:
      return "multicast";
    case OpKind::kCast:
      return "cast";
    case OpKind::kSum:
      return "sum";
    case OpKind::kZero:
      return "zero";
    case OpKind::kSignal:
      return "signal";
    case OpKind::kWait:
      return "wait";
    case OpKind::kRecord:
      return "record";
    case OpKind::kAwait:
      return "await";
  }
  return "?";
}

const char* Name(BufferKind kind) {
  switch (kind) {
    case BufferKind::kShard:
      return "shard";
    case BufferKind::kLanding:
      return "landing";
    case BufferKind::kGradient:
      return "gradient";
    case BufferKind::kStaging:
      return "staging";
    case BufferKind::kOutput:
      return "output";
  }
  return "?";
}

const char* Name(CounterKind kind) {
  switch (kind) {
    case CounterKind::kEntry:
      return "entry";
    case CounterKind::kDone:
      return "done";
    case CounterKind::kFilled:
      return "filled";
    case CounterKind::kReleased:
      return "released";
  }
  return "?";
}

const char* Name(Event event) {
  switch (event) {
    case Event::kReady:
      return "ready";
    case Event::kReadDone:
      return "read_done";
    case Event::kDone:
      return "done";
  }
  return "?";
}

std::string ToString(const Buffer& buffer) {
  if (buffer.kind == BufferKind::kLanding || buffer.kind == BufferKind::kOutput) {
    return Name(buffer.kind);
  }
  return fmt::format("{}[{}]", Name(buffer.kind), buffer.index);
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
  if (op.kind == OpKind::kSum) json["accumulate"] = op.accumulate;
  if (op.kind == OpKind::kSignal || op.kind == OpKind::kWait) {
    json["counter"] = Name(op.counter.kind);
    json["producer"] = op.counter.producer;
    json["sync"] = op.sync == Sync::kSafety ? "safety" : "pacing";
  }
  if (op.kind == OpKind::kWait) json["value"] = op.value;
  if (op.kind == OpKind::kRecord || op.kind == OpKind::kAwait) json["event"] = Name(op.event);
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
    case OpKind::kCast:
      return fmt::format("{} {} pieces, {} elements", head, op.casts.size(), Elems(op.casts));
    case OpKind::kSum:
      return fmt::format("{} {} pieces, {} elements{}", head, op.sums.size(), Elems(op.sums),
                         op.accumulate ? ", accumulating" : "");
    case OpKind::kSignal:
      return fmt::format("{} {} on rank {}", head, Name(op.counter.kind), op.peer);
    case OpKind::kWait:
      return fmt::format("{} {} of rank {} >= +{}", head, Name(op.counter.kind),
                         op.counter.producer, op.value);
    case OpKind::kRecord:
    case OpKind::kAwait:
      return fmt::format("{} {}", head, Name(op.event));
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
                                  {"value", inc.value}});
  }
  return json.dump(1);
}

}  // namespace tide
