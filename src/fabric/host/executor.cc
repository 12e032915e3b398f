#include "fabric/host/executor.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fabric/host/call_report.h"
#include "kernels/host/kernels.h"
#include "tide/error.h"

namespace tide::host {
namespace {

// Blocks of a multicast: small enough that the second and later destinations read the source from
// L2.
constexpr int64_t kMulticastBlockBytes = 256 * 1024;
// Of a refresh: what has been cast and compared is written from the first-level cache.
constexpr int64_t kRefreshBlockBytes = 16 * 1024;
constexpr int kYieldsBeforeSleep = 50;
// A bound on each sleep; a lost wake-up would cost this much, not a hang.
constexpr int64_t kMaxSleepNs = 100'000'000;
// A rank that waits wakes at least this often within its timeout, to say whom it waits for; it is
// believed until it has missed several times.
constexpr int kSleepsATimeout = 8;
constexpr int kMissedSleeps = 4;

double Seconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// The queue's first operation from index `from` on; past the end if there is none.
size_t NextOf(const Program& program, size_t queue, size_t from) {
  const auto& operations = program.operations;
  while (from < operations.size() && static_cast<size_t>(operations[from].queue) != queue) ++from;
  return from;
}

}  // namespace

Executor::Executor(int rank, const Topology& topology, const std::vector<ControlPage>& pages,
                   const AddressSpace& space, const Watchdog& watchdog,
                   std::chrono::nanoseconds timeout, std::function<void()> check_interrupt,
                   std::function<bool(const Program&, const Operation&)> may_run)
    : rank_(rank),
      pages_(pages),
      space_(space),
      watchdog_(watchdog),
      timeout_(timeout),
      check_interrupt_(std::move(check_interrupt)),
      may_run_(std::move(may_run)),
      bases_(CountersPerPage(topology)) {}

double Executor::Run(const Call& call, TraceSink* trace) {
  const auto deadline = Clock::now() + timeout_;
  const ControlPage& own = pages_[static_cast<size_t>(rank_)];
  Clock::duration waited{};
  int yields = 0;
  Begin(call);
  while (true) {
    // Read before any condition is tried: whatever rings afterwards moves the doorbell away from
    // `seen` and keeps Pause from sleeping through it.
    const uint32_t seen = own.header().doorbell.load(std::memory_order_seq_cst);
    Turn turn;
    for (size_t q = 0; q < cursors_.size(); ++q) RunQueue(call, q, trace, &turn);
    if (turn.progress && yields > 0) {
      own.Await(-1);
      yields = 0;
    }
    if (turn.blocked == nullptr && !turn.held) break;
    if (turn.progress || turn.held) continue;
    const auto start = Clock::now();
    Pause(call, *turn.blocked, seen, &yields, deadline);
    waited += Clock::now() - start;
  }
  for (const Increment& increment : call.program->increments) {
    bases_[own.CounterIndex(call.program->lane, increment.counter)] +=
        static_cast<uint64_t>(increment.value);
  }
  return std::chrono::duration<double>(waited).count();
}

void Executor::Begin(const Call& call) {
  recorded_.clear();
  cursors_.resize(call.program->queues.size());
  for (size_t q = 0; q < cursors_.size(); ++q) cursors_[q] = NextOf(*call.program, q, 0);
  if (call.identity.sequence != 0) {
    pages_[static_cast<size_t>(rank_)].header().calls.Publish(call.identity);
  }
}

void Executor::RunQueue(const Call& call, size_t queue, TraceSink* trace, Turn* turn) {
  const auto& operations = call.program->operations;
  size_t& at = cursors_[queue];
  while (at < operations.size()) {
    const Operation& op = operations[at];
    if (!Unblocked(call, op)) {
      // Own events follow from waits of other queues: those are what to report.
      if (turn->blocked == nullptr || op.kind == OpKind::kWait) turn->blocked = &op;
      return;
    }
    if (may_run_ && !may_run_(*call.program, op)) {
      turn->held = true;
      return;
    }
    const auto start = trace != nullptr ? Clock::now() : Clock::time_point();
    RunOne(call, op);
    if (trace != nullptr) trace->Add(call, op, Seconds(start), Seconds(Clock::now()));
    at = NextOf(*call.program, queue, at + 1);
    turn->progress = true;
  }
}

bool Executor::Unblocked(const Call& call, const Operation& op) const {
  if (op.kind == OpKind::kWait) return Satisfied(call, op);
  if (op.kind != OpKind::kAwait) return true;
  // The call blocks its caller, so the caller's events have happened.
  return op.event.kind == EventKind::kReady || op.event.kind == EventKind::kGate ||
         std::find(recorded_.begin(), recorded_.end(), op.event) != recorded_.end();
}

void Executor::RunOne(const Call& call, const Operation& op) {
  switch (op.kind) {
    case OpKind::kWait:
      // An increment of this call: the producer has published it. Nothing that a peer of another
      // call has sent is used.
      if (op.value > 0 && op.counter.producer != rank_) CompareCall(call, op.counter.producer);
      return;
    case OpKind::kSignal:
      kernels::StoreFence();
      Raise(call, op.peer, op.counter);
      pages_[static_cast<size_t>(op.peer)].Ring();
      return;
    case OpKind::kRecord:
      recorded_.push_back(op.event);
      return;
    case OpKind::kAwait:
      return;
    default:
      RunData(call, op);
  }
}

bool Executor::Satisfied(const Call& call, const Operation& op) const {
  const ControlPage& own = pages_[static_cast<size_t>(rank_)];
  // Acquire: pairs with the release in Raise.
  const uint64_t count =
      own.counter(call.program->lane, op.counter).load(std::memory_order_acquire);
  // Signed: a counter may still be below its base, by what earlier calls have yet to add.
  return static_cast<int64_t>(count - bases_[own.CounterIndex(call.program->lane, op.counter)]) >=
         op.value;
}

void Executor::CompareCall(const Call& call, int peer) const {
  const CallIdentity& theirs =
      pages_[static_cast<size_t>(peer)].header().calls.Peek(call.identity.sequence);
  if (theirs.key != call.identity.key || theirs.sequence != call.identity.sequence) {
    throw MismatchError(call, rank_, peer, theirs);
  }
}

void Executor::Raise(const Call& call, int peer, Counter counter) const {
  pages_[static_cast<size_t>(peer)]
      .counter(call.program->lane, counter)
      .fetch_add(1, std::memory_order_release);
}

char* Executor::Resolve(const Call& call, Ref ref, int rank) const {
  const BufferAddress& address = call.binding->buffers[static_cast<size_t>(ref.buffer)];
  char* base = address.local != nullptr || address.symmetric.segment < 0
                   ? static_cast<char*>(address.local)
                   : space_.Resolve(rank, address.symmetric);
  return base + ref.offset;
}

void Executor::RunData(const Call& call, const Operation& op) {
  switch (op.kind) {
    case OpKind::kCopy:
      Copy(call, op.pieces, op.peer);
      return;
    case OpKind::kMulticast:
      Multicast(call, op);
      return;
    case OpKind::kCast:
      for (const CastPiece& piece : op.casts) {
        kernels::Cast(Resolve(call, piece.dst, rank_), piece.dst_dtype,
                      Resolve(call, piece.src, rank_), piece.src_dtype,
                      static_cast<size_t>(piece.elems));
      }
      return;
    case OpKind::kRefresh:
      Refresh(call, op);
      return;
    case OpKind::kPut:
      Put(call, op);
      return;
    case OpKind::kSum:
      Sum(call, op);
      return;
    case OpKind::kLand:
      Land(call, op);
      return;
    case OpKind::kZero:
      for (const Piece& piece : op.pieces) {
        for (int64_t row = 0; row < piece.rows; ++row) {
          kernels::Zero(Resolve(call, piece.dst, rank_) + row * piece.dst_pitch,
                        static_cast<size_t>(piece.row_bytes));
        }
      }
      return;
    default:
      TIDE_CHECK(false);
  }
}

void Executor::Copy(const Call& call, const std::vector<Piece>& pieces, int rank) const {
  for (const Piece& piece : pieces) {
    char* dst = Resolve(call, piece.dst, rank);
    const char* src = Resolve(call, piece.src, rank_);
    for (int64_t row = 0; row < piece.rows; ++row) {
      kernels::Copy(dst + row * piece.dst_pitch, src + row * piece.src_pitch,
                    static_cast<size_t>(piece.row_bytes));
    }
  }
}

void Executor::Multicast(const Call& call, const Operation& op) const {
  const Topology& topology = call.program->topology;
  const int node = topology.Node(rank_);
  for (const Piece& piece : op.pieces) {
    const char* src = Resolve(call, piece.src, rank_);
    const char* own = Resolve(call, piece.dst, rank_);
    for (int64_t row = 0; row < piece.rows; ++row) {
      for (int64_t done = 0; done < piece.row_bytes; done += kMulticastBlockBytes) {
        const auto bytes = std::min(kMulticastBlockBytes, piece.row_bytes - done);
        for (int i = op.span == Span::kPeers ? 1 : 0; i < topology.local_ranks; ++i) {
          const int local = (topology.Local(rank_) + i) % topology.local_ranks;
          char* dst = Resolve(call, piece.dst, topology.Rank(node, local));
          // The ranks of a node may share the destination: then the first write serves them all,
          // and a source that is the own part of it (kPeers) lies there already.
          if (i > 0 && dst == own) continue;
          kernels::Copy(dst + row * piece.dst_pitch + done, src + row * piece.src_pitch + done,
                        static_cast<size_t>(bytes));
        }
      }
    }
  }
}

// Looks at the destinations of all ranks: what a rank has written to its own landing is found, too.
void Executor::Refresh(const Call& call, const Operation& op) {
  const Topology& topology = call.program->topology;
  const int node = topology.Node(rank_);
  for (const CastPiece& piece : op.casts) {
    const auto dst_item = static_cast<int64_t>(ItemSize(piece.dst_dtype));
    const auto src_item = static_cast<int64_t>(ItemSize(piece.src_dtype));
    const char* src = Resolve(call, piece.src, rank_);
    const char* own = Resolve(call, piece.dst, rank_);
    const int64_t block = kRefreshBlockBytes / dst_item;
    for (int64_t done = 0; done < piece.elems; done += block) {
      const int64_t elems = std::min(block, piece.elems - done);
      const auto bytes = static_cast<size_t>(elems * dst_item);
      const char* wanted = src + done * src_item;
      if (piece.dst_dtype != piece.src_dtype) {
        wanted_.resize(kRefreshBlockBytes);
        kernels::Cast(wanted_.data(), piece.dst_dtype, wanted, piece.src_dtype,
                      static_cast<size_t>(elems));
        wanted = wanted_.data();
      }
      for (int i = 0; i < topology.local_ranks; ++i) {
        const int local = (topology.Local(rank_) + i) % topology.local_ranks;
        char* dst = Resolve(call, piece.dst, topology.Rank(node, local));
        if (i > 0 && dst == own) continue;  // one memory a node
        dst += done * dst_item;
        if (std::memcmp(dst, wanted, bytes) != 0) kernels::Copy(dst, wanted, bytes);
      }
    }
  }
}

void Executor::Put(const Call& call, const Operation& op) const {
  for (const PutPiece& piece : op.puts) {
    if (piece.bytes > 0) {
      kernels::Copy(Resolve(call, piece.dst, op.peer), Resolve(call, piece.src, rank_),
                    static_cast<size_t>(piece.bytes));
    }
    kernels::StoreFence();
    Raise(call, op.peer, {piece.signal, rank_, piece.signal_index});
    pages_[static_cast<size_t>(op.peer)].Ring();
  }
}

void Executor::Sum(const Call& call, const Operation& op) {
  for (const SumPiece& piece : op.sums) {
    sources_.clear();
    for (const Ref& source : piece.sources) sources_.push_back(Resolve(call, source, rank_));
    kernels::Sum(Resolve(call, piece.dst, rank_), piece.dst_dtype, sources_.data(), sources_.size(),
                 piece.src_dtype, op.scaled ? call.binding->scale : 1.0F, op.accumulate,
                 static_cast<size_t>(piece.elems));
  }
}

void Executor::Land(const Call& call, const Operation& op) {
  const Topology& topology = call.program->topology;
  const int node = topology.Node(rank_);
  for (const LandPiece& piece : op.lands) {
    sources_.clear();
    const auto add = [&](int local) {
      sources_.push_back(Resolve(call, piece.block, topology.Rank(node, local)));
    };
    for (const int local : piece.locals) add(local);
    // A switch reduces over all ranks of the node. Blocks that the wave did not write are zero.
    for (int local = 0; local < topology.local_ranks; ++local) {
      if (std::find(piece.locals.begin(), piece.locals.end(), local) == piece.locals.end()) {
        add(local);
      }
    }
    kernels::Sum(Resolve(call, piece.dst, rank_), piece.dst_dtype, sources_.data(), sources_.size(),
                 DType::kF32, call.binding->scale, op.accumulate, static_cast<size_t>(piece.elems));
  }
}

void Executor::Pause(const Call& call, const Operation& blocked, uint32_t seen, int* yields,
                     Clock::time_point deadline) const {
  ThrowIfPointless(call, blocked);
  if (++*yields <= kYieldsBeforeSleep) {
    sched_yield();
    return;
  }
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
  if (left.count() <= 0) ThrowTimeout(call, blocked);
  check_interrupt_();
  pages_[static_cast<size_t>(rank_)].Await(Culprit(blocked.counter.producer));
  pages_[static_cast<size_t>(rank_)].Sleep(seen, std::min(left, LongestSleep()).count());
}

std::chrono::nanoseconds Executor::LongestSleep() const {
  return std::min<std::chrono::nanoseconds>(timeout_ / kSleepsATimeout,
                                            std::chrono::nanoseconds(kMaxSleepNs));
}

void Executor::ThrowIfPointless(const Call& call, const Operation& blocked) const {
  for (int peer = 0; peer < static_cast<int>(pages_.size()); ++peer) {
    const ControlPage& page = pages_[static_cast<size_t>(peer)];
    if (peer == rank_ || !page.valid()) continue;
    const machine::LastWords& words = page.header().last_words;
    if (words.left()) throw words.Take(peer, rank_);
  }
  const int producer = blocked.counter.producer;
  // A peer that is in another operation never signals on this lane: its published call tells.
  if (pages_[static_cast<size_t>(producer)].header().calls.last() >= call.identity.sequence) {
    CompareCall(call, producer);
  }
  if (watchdog_.Gone(producer) && !Satisfied(call, blocked)) {
    throw PeerGoneError(call, rank_, blocked);
  }
}

// Every rank publishes its answer before it sleeps and again when it wakes, so that the name
// travels to ranks that don't share a page with its owner.
int Executor::Culprit(int producer) const {
  const auto believed = kMissedSleeps * LongestSleep();
  const int next = pages_[static_cast<size_t>(producer)].Awaited(believed);
  return next >= 0 && next != rank_ ? next : producer;
}

void Executor::ThrowTimeout(const Call& call, const Operation& blocked) const {
  const int culprit = Culprit(blocked.counter.producer);
  throw TimeoutError(call, rank_, blocked, culprit, pages_[static_cast<size_t>(culprit)],
                     std::chrono::duration<double>(timeout_).count());
}

}  // namespace tide::host
