#include "fabric/nccl/lowering.h"

#include <algorithm>
#include <map>
#include <utility>

#include "fabric/nccl/device.h"
#include "tide/error.h"

namespace tide::nccl {
namespace {

using kernels::cuda::SumItem;
using kernels::cuda::ZeroItem;

// From here on the own copy of a multicast runs beside the pushes: below, the four calls that fork
// and join cost more than the copy (2.5 us each against 2 TB/s).
constexpr int64_t kOwnCopyBytes = int64_t{4} << 20;
// Transfers of one group. NCCL's queue to a peer holds 256, and filling it up from the host before
// the group is launched would block for ever.
constexpr int kMaxSends = 128;
// Pitched copies take no larger pitch (cudaDevAttrMaxPitch).
constexpr int64_t kMaxPitch = 0x7fffffff;

class Lowering {
 public:
  Lowering(const Program& program, Reach reach) : program_(program), reach_(reach) {
    for (int b = 0; b < static_cast<int>(program.buffers.size()); ++b) BaseOf(b, program.rank);
    for (const std::string& queue : program.queues) lowered_.streams.push_back(queue);
  }

  Lowered Run() {
    const bool waits_for_caller = HasEvent(OpKind::kAwait, EventKind::kReady);
    const bool tells_caller = HasEvent(OpKind::kRecord, EventKind::kDone);
    for (int q = 0; !waits_for_caller && q < Queues(); ++q) Await(q, kReadyEvent);
    for (const Operation& op : program_.operations) Add(op);
    if (!tells_caller) JoinQueues();
    lowered_.records_read_done = HasEvent(OpKind::kRecord, EventKind::kReadDone);
    return std::move(lowered_);
  }

 private:
  int Queues() const { return static_cast<int>(program_.queues.size()); }
  bool HasEvent(OpKind kind, EventKind event) const {
    return std::any_of(
        program_.operations.begin(), program_.operations.end(),
        [&](const Operation& op) { return op.kind == kind && op.event.kind == event; });
  }
  bool SameNode(int rank) const {
    return program_.topology.Node(rank) == program_.topology.Node(program_.rank);
  }

  int BaseOf(int buffer, int rank) {
    const auto next = static_cast<int>(lowered_.bases.size());
    const auto [found, added] = base_index_.emplace(std::pair(buffer, rank), next);
    if (added) lowered_.bases.push_back({buffer, rank});
    return found->second;
  }
  Place At(Ref ref, int rank) { return {BaseOf(ref.buffer, rank), ref.offset}; }
  Place At(Ref ref) { return At(ref, program_.rank); }

  void Add(const Operation& op);
  void Copies(int stream, const std::vector<Piece>& pieces, const std::vector<int>& ranks);
  void AddPiece(const Piece& piece, int rank);
  void Multicast(const Operation& op);
  void Sync(const Operation& op);
  void Send(int stream, LoweredSend send);
  void Sums(const Operation& op, LoweredSum sum);
  std::vector<SumItem> LandItems(const Operation& op);
  std::vector<SumItem> RefreshItems(const Operation& op);
  std::vector<int> Siblings() const;
  void Zero(const Operation& op);
  void JoinQueues();

  void Record(int stream, int event) {
    lowered_.commands.push_back({CommandKind::kRecord, stream, event});
  }
  void Await(int stream, int event) {
    lowered_.commands.push_back({CommandKind::kAwait, stream, event});
  }
  int NewEvent() { return lowered_.events++; }
  int EventOf(const Event& event);
  // A stream beside that of the queue.
  int StreamBeside(int queue);
  // The last command if it is of this kind, on this stream and below `limit`; else a new one.
  Command& Extend(CommandKind kind, int stream, int first, int limit);

  const Program& program_;
  const Reach reach_;
  Lowered lowered_;
  std::map<std::pair<int, int>, int> base_index_;
  std::map<int, int> local_events_;
  std::map<int, int> streams_beside_;
};

Command& Lowering::Extend(CommandKind kind, int stream, int first, int limit) {
  auto& commands = lowered_.commands;
  if (commands.empty() || commands.back().kind != kind || commands.back().stream != stream ||
      commands.back().count >= limit) {
    return commands.emplace_back(Command{kind, stream, first, 1});
  }
  ++commands.back().count;
  return commands.back();
}

int Lowering::EventOf(const Event& event) {
  switch (event.kind) {
    case EventKind::kReady:
      return kReadyEvent;
    case EventKind::kGate:
      return kGateEvent;
    case EventKind::kReadDone:
      return kReadDoneEvent;
    case EventKind::kDone:
      return kDoneEvent;
    case EventKind::kLocal:
      break;
  }
  const auto [found, added] = local_events_.emplace(event.index, lowered_.events);
  if (added) ++lowered_.events;
  return found->second;
}

int Lowering::StreamBeside(int queue) {
  const auto next = static_cast<int>(lowered_.streams.size());
  const auto [found, added] = streams_beside_.emplace(queue, next);
  if (added) {
    lowered_.streams.push_back(program_.queues[static_cast<size_t>(queue)] + ", own copies");
  }
  return found->second;
}

void Lowering::Add(const Operation& op) {
  switch (op.kind) {
    case OpKind::kCopy:
      Copies(op.queue, op.pieces, {op.peer});
      return;
    case OpKind::kMulticast:
      Multicast(op);
      return;
    case OpKind::kPut:
      for (const PutPiece& put : op.puts) {
        Send(op.queue, {op.peer,
                        put.dst.buffer,
                        put.dst.offset,
                        At(put.src),
                        put.bytes,
                        {put.signal, program_.rank, put.signal_index}});
      }
      return;
    case OpKind::kCast: {
      std::vector<SumItem> items;
      for (const CastPiece& cast : op.casts) {
        items.push_back({At(cast.dst), {At(cast.src)}, cast.elems, cast.dst_dtype, cast.src_dtype});
      }
      Sums(op, {std::move(items), SumKind::kCast});
      return;
    }
    case OpKind::kRefresh:
      Sums(op, {RefreshItems(op), SumKind::kRefresh});
      return;
    case OpKind::kSum: {
      std::vector<SumItem> items;
      for (const SumPiece& sum : op.sums) {
        SumItem& item = items.emplace_back();
        item = {At(sum.dst), {}, sum.elems, sum.dst_dtype, sum.src_dtype};
        for (const Ref& source : sum.sources) item.sources.push_back(At(source));
      }
      Sums(op, {std::move(items), SumKind::kSum, op.scaled, op.accumulate});
      return;
    }
    case OpKind::kLand:
      Sums(op, {LandItems(op), reach_ == Reach::kMulticast ? SumKind::kMulticast : SumKind::kSum,
                /*scaled=*/true, op.accumulate});
      return;
    case OpKind::kZero:
      Zero(op);
      return;
    case OpKind::kSignal:
    case OpKind::kWait:
      Sync(op);
      return;
    case OpKind::kRecord:
      Record(op.queue, EventOf(op.event));
      return;
    case OpKind::kAwait:
      Await(op.queue, EventOf(op.event));
      return;
  }
}

// One batch of all pieces to all ranks, and one of the pitched among them.
void Lowering::Copies(int stream, const std::vector<Piece>& pieces, const std::vector<int>& ranks) {
  const size_t copies = lowered_.copies.size();
  const size_t pitched = lowered_.pitched.size();
  for (const int rank : ranks) {
    for (const Piece& piece : pieces) AddPiece(piece, rank);
  }
  const auto add = [&](CommandKind kind, size_t first, size_t end) {
    if (end == first) return;
    lowered_.commands.push_back(
        {kind, stream, static_cast<int>(first), static_cast<int>(end - first)});
  };
  add(CommandKind::kCopies, copies, lowered_.copies.size());
  add(CommandKind::kPitched, pitched, lowered_.pitched.size());
}

void Lowering::AddPiece(const Piece& piece, int rank) {
  if (piece.row_bytes == 0 || piece.rows == 0) return;
  const Place dst = At(piece.dst, rank);
  const Place src = At(piece.src);
  const bool dense = piece.dst_pitch == piece.row_bytes && piece.src_pitch == piece.row_bytes;
  if (piece.rows == 1 || dense) {
    lowered_.copies.push_back({dst, src, piece.rows * piece.row_bytes});
    return;
  }
  if (std::max(piece.dst_pitch, piece.src_pitch) > kMaxPitch) {
    for (int64_t row = 0; row < piece.rows; ++row) {
      lowered_.copies.push_back({{dst.base, dst.offset + row * piece.dst_pitch},
                                 {src.base, src.offset + row * piece.src_pitch},
                                 piece.row_bytes});
    }
    return;
  }
  lowered_.pitched.push_back(
      {dst, src, piece.row_bytes, piece.rows, piece.dst_pitch, piece.src_pitch});
}

// Each rank starts with another one.
std::vector<int> Lowering::Siblings() const {
  const Topology& topology = program_.topology;
  std::vector<int> ranks;
  for (int i = 1; i < topology.local_ranks; ++i) {
    ranks.push_back(topology.Rank(topology.Node(program_.rank),
                                  (topology.Local(program_.rank) + i) % topology.local_ranks));
  }
  return ranks;
}

// From the own landing to the peers' it is unicast, whatever the reach: the multicast address would
// write to the source while the copy reads it, and copies don't allow that.
void Lowering::Multicast(const Operation& op) {
  if (reach_ == Reach::kMulticast && op.span == Span::kNode) {
    Copies(op.queue, op.pieces, {kWholeNode});
    return;
  }
  std::vector<int> ranks = Siblings();
  if (op.span == Span::kPeers) {
    Copies(op.queue, op.pieces, ranks);
    return;
  }
  int64_t bytes = 0;
  for (const Piece& piece : op.pieces) bytes += piece.rows * piece.row_bytes;
  if (bytes < kOwnCopyBytes || ranks.empty()) {
    ranks.push_back(program_.rank);
    Copies(op.queue, op.pieces, ranks);
    return;
  }
  const int beside = StreamBeside(op.queue);
  const int fork = NewEvent();
  const int join = NewEvent();
  Record(op.queue, fork);
  Await(beside, fork);
  Copies(beside, op.pieces, {program_.rank});
  Record(beside, join);
  Copies(op.queue, op.pieces, ranks);
  Await(op.queue, join);
}

void Lowering::Sync(const Operation& op) {
  const bool wait = op.kind == OpKind::kWait;
  const int other = wait ? op.counter.producer : op.peer;
  const LoweredSync sync{wait, op.counter, op.peer, op.value};
  if (SameNode(other)) {
    Extend(CommandKind::kMemoryOps, op.queue, static_cast<int>(lowered_.memory_ops.size()),
           static_cast<int>(kMaxMemoryOps));
    lowered_.memory_ops.push_back(sync);
  } else if (wait) {
    Extend(CommandKind::kRailWaits, op.queue, static_cast<int>(lowered_.rail_waits.size()),
           kMaxSends);
    lowered_.rail_waits.push_back(sync);
  } else {
    Send(op.queue, {op.peer, 0, 0, {}, 0, op.counter});
  }
}

void Lowering::Send(int stream, LoweredSend send) {
  RailSignalOf(send.counter);
  Extend(CommandKind::kSends, stream, static_cast<int>(lowered_.sends.size()), kMaxSends);
  lowered_.sends.push_back(send);
}

void Lowering::Sums(const Operation& op, LoweredSum sum) {
  if (sum.items.empty()) return;
  lowered_.commands.push_back(
      {CommandKind::kSum, op.queue, static_cast<int>(lowered_.sums.size())});
  lowered_.sums.push_back(std::move(sum));
}

// The blocks of all local ranks: those of the wave in its order, then the others, which are zero.
// Adding a zero turns -0 into +0, so they are added here as a switch does. A switch chooses its own
// order, and has one source: the block behind the multicast address.
std::vector<SumItem> Lowering::LandItems(const Operation& op) {
  const Topology& topology = program_.topology;
  const int node = topology.Node(program_.rank);
  std::vector<SumItem> items;
  for (const LandPiece& land : op.lands) {
    SumItem& item = items.emplace_back();
    item = {At(land.dst), {}, land.elems, land.dst_dtype, DType::kF32};
    if (reach_ == Reach::kMulticast) {
      item.sources = {At(land.block, kWholeNode)};
      continue;
    }
    std::vector<int> locals = land.locals;
    for (int local = 0; local < topology.local_ranks; ++local) {
      if (std::find(locals.begin(), locals.end(), local) == locals.end()) locals.push_back(local);
    }
    for (const int local : locals) {
      item.sources.push_back(At(land.block, topology.Rank(node, local)));
    }
  }
  return items;
}

std::vector<SumItem> Lowering::RefreshItems(const Operation& op) {
  std::vector<SumItem> items;
  for (const CastPiece& cast : op.casts) {
    SumItem& item = items.emplace_back();
    item = {At(cast.dst), {At(cast.src)}, cast.elems, cast.dst_dtype, cast.src_dtype};
    for (const int rank : Siblings()) item.copies.push_back(At(cast.dst, rank));
  }
  return items;
}

void Lowering::Zero(const Operation& op) {
  std::vector<ZeroItem> items;
  for (const Piece& piece : op.pieces) {
    for (int64_t row = 0; row < piece.rows && piece.row_bytes > 0; ++row) {
      const Place dst = At(piece.dst);
      items.push_back({{dst.base, dst.offset + row * piece.dst_pitch}, piece.row_bytes});
    }
  }
  if (items.empty()) return;
  lowered_.commands.push_back(
      {CommandKind::kZero, op.queue, static_cast<int>(lowered_.zeros.size())});
  lowered_.zeros.push_back(std::move(items));
}

// For programs that tell the caller nothing: they are done when all their queues are.
void Lowering::JoinQueues() {
  for (int q = 1; q < Queues(); ++q) {
    const int event = NewEvent();
    Record(q, event);
    Await(0, event);
  }
  if (Queues() > 0) Record(0, kDoneEvent);
}

}  // namespace

RailSignal RailSignalOf(const Counter& counter) {
  switch (counter.kind) {
    case CounterKind::kEntry:
      return {0, 0};
    case CounterKind::kHead:
      return {1, counter.index};
    case CounterKind::kConfirmed:
      return {2, 0};
    case CounterKind::kCredit:
      return {3 + counter.index, 0};
    case CounterKind::kArrived:
      return {5 + counter.index / kMaxContexts, counter.index % kMaxContexts};
    default:
      TIDE_CHECK(false);
  }
  return {};
}

Lowered Lower(const Program& program, Reach reach) { return Lowering(program, reach).Run(); }

}  // namespace tide::nccl
