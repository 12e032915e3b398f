// Programs written by hand, and inputs made of them.
#ifndef TIDE_TESTS_VERIFY_HANDMADE_H_
#define TIDE_TESTS_VERIFY_HANDMADE_H_

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan/builder.h"
#include "testing/programs.h"
#include "verify/input.h"

namespace tide::testing {

using internal::Builder;

inline constexpr int64_t kBytes = 64;

// All calls run these programs; each buffer is one object that the calls share. Only staging,
// inboxes and outboxes are regions of a lane. Every rank's caller fills gradients at first.
inline verify::Input MakeInput(const std::vector<Program>& programs, int calls = 1) {
  verify::Input input;
  input.topology = programs[0].topology;
  verify::Call call;
  for (const Program& program : programs) {
    call.programs.push_back(std::make_shared<const Program>(program));
    for (const Buffer& buffer : program.buffers) {
      const std::pair<BufferKind, int> key{buffer.kind, buffer.index};
      if (call.places.count(key) != 0) continue;
      const bool lane_owned = buffer.kind == BufferKind::kStaging ||
                              buffer.kind == BufferKind::kInbox ||
                              buffer.kind == BufferKind::kOutbox;
      call.places[key] = {static_cast<int>(input.objects.size()), 0};
      input.objects.push_back({ToString(buffer), lane_owned, false});
    }
  }
  input.calls.assign(static_cast<size_t>(calls), call);

  verify::CallerStep write;
  write.kind = verify::CallerStep::Kind::kWrite;
  write.call = calls - 1;  // a predecessor writes nothing
  write.what = "fills the gradient";
  write.contents = [places = call.places](int rank) {
    std::vector<verify::Content> contents;
    const auto gradient = places.find({BufferKind::kGradient, 0});
    if (gradient == places.end()) return contents;
    verify::Content& content = contents.emplace_back();
    content.place = gradient->second;
    content.bytes = kBytes;
    content.kind = verify::ContentKind::kGradient;
    content.rank = rank;
    return contents;
  };
  input.calls[0].before.push_back(std::move(write));
  for (int i = 0; i < calls; ++i) {
    verify::CallerStep ready;
    ready.kind = verify::CallerStep::Kind::kRecord;
    ready.call = i;
    ready.event = {EventKind::kReady};
    input.calls[static_cast<size_t>(i)].before.push_back(std::move(ready));
  }
  return input;
}

inline void Copy(Builder& builder, int queue, int peer, Ref dst, Ref src, int64_t bytes = kBytes) {
  Operation& copy = builder.Add(queue, OpKind::kCopy);
  copy.peer = peer;
  copy.pieces.push_back({dst, src, bytes});
}

inline void Sum(Builder& builder, int queue, Ref dst, std::vector<Ref> sources,
                int64_t bytes = kBytes) {
  SumPiece piece;
  piece.dst = dst;
  piece.sources = std::move(sources);
  piece.elems = bytes / static_cast<int64_t>(ItemSize(DType::kF32));
  builder.Add(queue, OpKind::kSum).sums.push_back(std::move(piece));
}

inline void WaitAll(Builder& builder, int queue, Counter counter, int64_t value) {
  builder.Wait(queue, counter, value);
  builder.Expect(counter, value);
}

inline std::vector<FindingKind> Kinds(const verify::Input& input) {
  std::vector<FindingKind> kinds;
  for (const Finding& finding : verify::Verify(input, {}).findings) {
    if (std::find(kinds.begin(), kinds.end(), finding.kind) == kinds.end()) {
      kinds.push_back(finding.kind);
    }
  }
  return kinds;
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_VERIFY_HANDMADE_H_
