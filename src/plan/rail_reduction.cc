#include "plan/rail_reduction.h"

#include <algorithm>
#include <utility>

#include "plan/striping.h"

namespace tide::internal {

RailReduction::RailReduction(Builder* builder, const ShardSpan& span, const ReductionShape& shape,
                             const ReduceScatterSpec& spec, const ReduceScatterOptions& options,
                             ReductionOutput* output)
    : builder_(*builder),
      span_(span),
      shape_(shape),
      spec_(spec),
      options_(options),
      output_(*output),
      rail_(builder->AddQueue("rail")),
      land_(builder->AddQueue("land")),
      pieces_in_(static_cast<size_t>(shape.generations() * kMaxContexts),
                 std::vector<int64_t>(static_cast<size_t>(builder->nodes()))),
      credits_(static_cast<size_t>(shape.generations()),
               std::vector<int64_t>(static_cast<size_t>(builder->nodes()))),
      placed_(static_cast<size_t>(shape.generations())),
      reduced_(static_cast<size_t>(shape.generations())) {
  outbox_ = builder_.AddBuffer(BufferKind::kOutbox, spec.bank,
                               shape.outbox_blocks() * shape.block_bytes());
  if (!shape.own_from_gradient()) {
    spare_ =
        builder_.AddBuffer(BufferKind::kSpare, spec.bank, shape.passes() * shape.block_bytes());
  }
  for (int g = 0; g < shape.generations(); ++g) {
    inbox_.push_back(
        builder_.AddBuffer(BufferKind::kInbox, g, shape.inbox_blocks() * shape.block_bytes()));
  }
}

int64_t RailReduction::Bytes(int64_t elems) const {
  return elems * static_cast<int64_t>(ItemSize(shape_.wire_dtype()));
}

// Remote blocks are reduced and sent in this order: J of the paper's algorithm 1.
int RailReduction::Block(int pass, int contributor) const {
  return pass * (builder_.nodes() - 1) + contributor - 1;
}

Interval RailReduction::Part(int contributor, int pass) const {
  return shape_.Part(
      shape_.latin() ? SubSlice(builder_.topology(), builder_.local(), contributor) : 0, pass);
}

NodeReduction::Sink RailReduction::Outbox(const Unit& unit, Interval part) const {
  return [this, unit, part](int row, const SpanRun& run) -> Ref {
    const int contributor = shape_.latin() ? unit.first : unit.first + row;
    const int64_t slot = Block(unit.pass, contributor) % shape_.outbox_blocks();
    const int64_t elem = (shape_.latin() ? row * shape_.part() : 0) + run.position - part.begin;
    return {outbox_, slot * shape_.block_bytes() + Bytes(elem)};
  };
}

NodeReduction::Sink RailReduction::Spare(const Unit& unit, Interval part) const {
  return [this, unit, part](int row, const SpanRun& run) -> Ref {
    return {spare_, unit.pass * shape_.block_bytes() +
                        Bytes(row * shape_.part() + run.position - part.begin)};
  };
}

void RailReduction::AwaitOutbox(int queue, const Unit& unit) {
  const int first = Block(unit.pass, unit.first);
  const int needed = first + unit.count - shape_.outbox_blocks();
  if (first > 0 && needed <= 0) return;
  // The first unit waits for all sends of the call before the last, which used this bank.
  builder_.Wait(queue, {CounterKind::kOutboxFree, builder_.rank(), spec_.bank},
                std::max(needed, 0));
}

void RailReduction::AwaitSpare(int queue) {
  builder_.Wait(queue, {CounterKind::kSpareFree, builder_.rank(), spec_.bank}, 0);
}

void RailReduction::Begin() {
  builder_.Await(rail_, {EventKind::kGate});
  output_.Begin(land_);
}

// The pieces of a contributor's transfer. Sender and receiver have the same local rank, so they
// mean the same sub-slice and cut it alike.
std::vector<PutPiece> RailReduction::Cut(int contributor, int pass) const {
  const int wave = (contributor - 1) / shape_.waves()[0].count;
  const Instance instance = shape_.At(pass * static_cast<int>(shape_.waves().size()) + wave);
  const int64_t block = shape_.latin()
                            ? SubSlice(builder_.topology(), builder_.local(), contributor)
                            : contributor - shape_.waves()[static_cast<size_t>(wave)].first;
  const int64_t slot = Block(pass, contributor) % shape_.outbox_blocks();
  const int64_t length = Part(contributor, pass).length();
  Run run{{inbox_[static_cast<size_t>(instance.generation)], block * shape_.block_bytes()},
          {outbox_, slot * shape_.block_bytes()},
          length > 0 ? Bytes((shape_.rows() - 1) * shape_.part() + length) : 0};
  // A counter a generation: a transfer to the other one may overtake this one's on other contexts.
  return Stripe({run}, {options_.contexts, options_.min_stripe_bytes}, CounterKind::kArrived,
                instance.generation);
}

void RailReduction::WaitForCredit(int contributor, const Instance& instance) {
  const auto g = static_cast<size_t>(instance.generation);
  // Without an earlier use in this call the wait is for the credits of all earlier calls.
  int64_t value = 0;
  if (instance.index >= shape_.generations()) {
    value = ++credits_[g][static_cast<size_t>(contributor)];
  }
  builder_.Wait(rail_, {CounterKind::kCredit, builder_.RailPeer(contributor), instance.generation},
                value);
}

void RailReduction::Send(const Round& round, int pass, Event filled) {
  const auto waves = static_cast<int>(shape_.waves().size());
  const Instance instance = shape_.At(pass * waves + round.wave);
  builder_.Await(rail_, filled);
  for (int c = round.first; c < round.first + round.count; ++c) WaitForCredit(c, instance);
  for (int c = round.first; c < round.first + round.count; ++c) {
    Operation& put = builder_.Add(rail_, OpKind::kPut);
    put.peer = builder_.RailPeer(c);
    put.puts = Cut(c, pass);
  }
  for (int c = 0; c < round.count; ++c) {
    builder_.Signal(rail_, builder_.rank(), CounterKind::kOutboxFree, spec_.bank);
  }
  for (int c = round.first; c < round.first + round.count; ++c) {
    const int sender = builder_.RailPeer(-c);
    for (const Increment& increment : Increments(Cut(c, pass), sender)) {
      int64_t& pieces =
          pieces_in_[static_cast<size_t>(increment.counter.index)][static_cast<size_t>(c)];
      pieces += increment.value;
      builder_.Wait(rail_, increment.counter, pieces);
    }
  }
}

void RailReduction::Land(const Instance& instance, Event own, const NodeReduction& sources) {
  const Wave& wave = shape_.waves()[static_cast<size_t>(instance.wave)];
  const bool has_own = shape_.Contains(instance.wave, builder_.nodes());
  if (has_own && !shape_.own_from_gradient()) builder_.Await(land_, own);
  if (shape_.latin()) PrepareBlocks(instance);
  if (wave.first < builder_.nodes()) {
    const Event arrived = builder_.NewEvent();
    builder_.Record(rail_, arrived);
    builder_.Await(land_, arrived);
  }
  if (shape_.latin()) {
    LandLatin(instance);
  } else {
    LandDirect(instance, sources);
  }
  if (has_own && spare_ >= 0) {
    builder_.Signal(land_, builder_.rank(), CounterKind::kSpareFree, spec_.bank);
  }
  GiveCredits(instance);
}

void RailReduction::GiveCredits(const Instance& instance) {
  const Wave& next = shape_.waves()[static_cast<size_t>(shape_.NextWave(instance))];
  for (int c = next.first; c < std::min(next.end(), builder_.nodes()); ++c) {
    builder_.Signal(land_, builder_.RailPeer(-c), CounterKind::kCredit, instance.generation);
  }
}

// Contributors lie in own memory, in order: one sum.
void RailReduction::LandDirect(const Instance& instance, const NodeReduction& sources) {
  const Wave& wave = shape_.waves()[static_cast<size_t>(instance.wave)];
  const Interval part = shape_.Part(0, instance.pass);
  const int inbox = inbox_[static_cast<size_t>(instance.generation)];
  std::vector<SumPiece> sums;
  for (const SpanRun& run : span_.Runs(part)) {
    const int64_t live = span_.LiveElems(run, builder_.rank());
    if (live == 0) continue;
    SumPiece& piece = sums.emplace_back();
    piece.dst = output_.At(run);
    piece.elems = live;
    piece.dst_dtype = output_.dtype();
    piece.src_dtype = shape_.wire_dtype();
    const int64_t offset = Bytes(run.position - part.begin);
    for (int c = wave.first; c < wave.end(); ++c) {
      if (c < builder_.nodes()) {
        piece.sources.push_back({inbox, (c - wave.first) * shape_.block_bytes() + offset});
      } else if (spare_ >= 0) {
        piece.sources.push_back({spare_, instance.pass * shape_.block_bytes() + offset});
      } else {
        piece.sources.push_back(sources.Gradient(run, builder_.rank()));
      }
    }
  }
  if (sums.empty()) return;
  Operation& sum = builder_.Add(land_, OpKind::kSum);
  sum.sums = std::move(sums);
  sum.scaled = true;
  sum.accumulate = spec_.accumulate || instance.wave > 0;
}

// Which of this rank's inbox blocks a wave writes, the own node's included.
std::vector<bool> RailReduction::Written(int wave) const {
  std::vector<bool> written(static_cast<size_t>(builder_.siblings()));
  const Wave& w = shape_.waves()[static_cast<size_t>(wave)];
  for (int c = w.first; c < w.end(); ++c) {
    written[static_cast<size_t>(SubSlice(builder_.topology(), builder_.local(), c))] = true;
  }
  return written;
}

// Zeroes the blocks that would be stale and brings in the own-node partial.
void RailReduction::PrepareBlocks(const Instance& instance) {
  const int inbox = inbox_[static_cast<size_t>(instance.generation)];
  const std::vector<bool> written = Written(instance.wave);
  std::vector<bool> stale(written.size(), true);
  if (instance.index >= shape_.generations()) {
    // What the use before did not write is still zero.
    stale = Written(shape_.At(instance.index - shape_.generations()).wave);
  }
  std::vector<Piece> zeros;
  for (size_t s = 0; s < written.size(); ++s) {
    if (written[s] || !stale[s]) continue;
    const Ref dst{inbox, static_cast<int64_t>(s) * shape_.block_bytes()};
    zeros.push_back({dst, dst, shape_.block_bytes()});
  }
  if (!zeros.empty()) builder_.Add(land_, OpKind::kZero).pieces = std::move(zeros);

  const Interval part = Part(builder_.nodes(), instance.pass);
  if (shape_.Contains(instance.wave, builder_.nodes()) && part.length() > 0) {
    const int64_t block = SubSlice(builder_.topology(), builder_.local(), builder_.nodes());
    Operation& copy = builder_.Add(land_, OpKind::kCopy);
    copy.peer = builder_.rank();
    copy.pieces.push_back({{inbox, block * shape_.block_bytes()},
                           {spare_, instance.pass * shape_.block_bytes()},
                           Bytes(part.length()),
                           shape_.rows(),
                           Bytes(shape_.part()),
                           Bytes(shape_.part())});
  }
}

void RailReduction::Fence(CounterKind kind, int generation, std::vector<int64_t>* fences) {
  const int64_t fence = ++(*fences)[static_cast<size_t>(generation)];
  builder_.SignalSiblings(land_, kind, generation);
  builder_.WaitForSiblings(land_, kind, fence, generation);
}

// Between two fences: all siblings have received, zeroed and placed their blocks; all have read
// them.
void RailReduction::LandLatin(const Instance& instance) {
  Fence(CounterKind::kPlaced, instance.generation, &placed_);
  const Topology& topology = builder_.topology();
  const Wave& wave = shape_.waves()[static_cast<size_t>(instance.wave)];
  const int inbox = inbox_[static_cast<size_t>(instance.generation)];
  std::vector<LandPiece> lands;
  for (int slice = 0; slice < builder_.siblings(); ++slice) {
    const Interval part = shape_.Part(slice, instance.pass);
    std::vector<int> locals;
    for (int c = wave.first; c < wave.end(); ++c) {
      locals.push_back(ReceivingLocal(topology, slice, c));
    }
    for (const SpanRun& run : span_.Runs(part)) {
      const int64_t live = span_.LiveElems(run, builder_.rank());
      if (live == 0) continue;
      const int64_t elem = builder_.local() * shape_.part() + run.position - part.begin;
      lands.push_back({output_.At(run),
                       {inbox, slice * shape_.block_bytes() + Bytes(elem)},
                       locals,
                       live,
                       output_.dtype()});
    }
  }
  if (!lands.empty()) {
    Operation& land = builder_.Add(land_, OpKind::kLand);
    land.lands = std::move(lands);
    land.accumulate = spec_.accumulate || instance.wave > 0;
  }
  // Credits follow all siblings' landings. Without credits the `placed` fence of the instance
  // between this one and the generation's next use is enough.
  const Wave& next = shape_.waves()[static_cast<size_t>(shape_.NextWave(instance))];
  if (next.first < builder_.nodes() || shape_.generations() == 1) {
    Fence(CounterKind::kReduced, instance.generation, &reduced_);
  }
}

void RailReduction::End() {
  output_.End(land_);
  for (int c = 1; c < builder_.nodes(); ++c) {
    std::vector<int64_t> credits(static_cast<size_t>(shape_.generations()));
    for (int x = 0; x < shape_.instances(); ++x) {
      const Instance instance = shape_.At(x);
      credits[static_cast<size_t>(instance.generation)] +=
          shape_.Contains(shape_.NextWave(instance), c) ? 1 : 0;
    }
    for (size_t index = 0; index < pieces_in_.size(); ++index) {
      builder_.Expect({CounterKind::kArrived, builder_.RailPeer(-c), static_cast<int>(index)},
                      pieces_in_[index][static_cast<size_t>(c)]);
    }
    for (int g = 0; g < shape_.generations(); ++g) {
      builder_.Expect({CounterKind::kCredit, builder_.RailPeer(c), g},
                      credits[static_cast<size_t>(g)]);
    }
  }
  builder_.Expect({CounterKind::kOutboxFree, builder_.rank(), spec_.bank}, shape_.remote_blocks());
  if (spare_ >= 0) {
    builder_.Expect({CounterKind::kSpareFree, builder_.rank(), spec_.bank}, shape_.passes());
  }
  if (!shape_.latin()) return;
  for (int g = 0; g < shape_.generations(); ++g) {
    builder_.ExpectOfSiblings(CounterKind::kPlaced, placed_[static_cast<size_t>(g)], g);
    builder_.ExpectOfSiblings(CounterKind::kReduced, reduced_[static_cast<size_t>(g)], g);
  }
}

}  // namespace tide::internal
