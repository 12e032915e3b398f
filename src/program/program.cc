#include "tide/program.h"

#include <algorithm>

namespace tide {
namespace {

bool MovesData(OpKind kind) {
  switch (kind) {
    case OpKind::kCopy:
    case OpKind::kMulticast:
    case OpKind::kCast:
    case OpKind::kSum:
    case OpKind::kZero:
      return true;
    case OpKind::kSignal:
    case OpKind::kWait:
    case OpKind::kRecord:
    case OpKind::kAwait:
      return false;
  }
  return false;
}

}  // namespace

Program WithoutSynchronisation(Program program) {
  auto& operations = program.operations;
  operations.erase(std::remove_if(operations.begin(), operations.end(),
                                  [](const Operation& op) { return !MovesData(op.kind); }),
                   operations.end());
  program.increments.clear();
  return program;
}

}  // namespace tide
