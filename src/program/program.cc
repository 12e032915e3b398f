#include "tide/program.h"

#include <algorithm>

namespace tide {
namespace {

bool MovesData(OpKind kind) {
  switch (kind) {
    case OpKind::kSignal:
    case OpKind::kWait:
    case OpKind::kRecord:
    case OpKind::kAwait:
      return false;
    default:
      return true;
  }
}

}  // namespace

bool Buffer::symmetric() const {
  switch (kind) {
    case BufferKind::kResident:
    case BufferKind::kLanding:
    case BufferKind::kStage:
    case BufferKind::kStaging:
    case BufferKind::kOutbox:
    case BufferKind::kInbox:
      return true;
    default:
      return false;
  }
}

Program WithoutSynchronisation(Program program) {
  auto& operations = program.operations;
  operations.erase(std::remove_if(operations.begin(), operations.end(),
                                  [](const Operation& op) { return !MovesData(op.kind); }),
                   operations.end());
  for (Operation& op : operations) {
    if (op.kind != OpKind::kPut) continue;
    op.kind = OpKind::kCopy;
    for (const PutPiece& put : op.puts) op.pieces.push_back({put.dst, put.src, put.bytes});
    op.puts.clear();
  }
  program.increments.clear();
  return program;
}

}  // namespace tide
