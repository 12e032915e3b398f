#include "tide/error.h"

#include <cerrno>
#include <cstring>

namespace tide {

const char* Name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kPeerDead:
      return "peer_dead";
    case ErrorCode::kOutOfMemory:
      return "out_of_memory";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kPoisoned:
      return "poisoned";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "?";
}

namespace internal {

void CheckFailed(const char* file, int line, const char* condition) {
  throw Error(ErrorCode::kInternal, std::string(file) + ":" + std::to_string(line) +
                                        ": broken invariant: " + condition +
                                        "; this is a bug of TIDE, please report it");
}

void ThrowErrno(const std::string& what) {
  const int error = errno;
  throw Error(ErrorCode::kInternal, what + ": " + std::strerror(error));
}

}  // namespace internal
}  // namespace tide
