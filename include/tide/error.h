// The one exception family of TIDE and the always-on invariant check.
//
// Error: something outside this rank's code went wrong, or the caller asked for something
// impossible. The sentence says what was expected, what came and what to do. TIDE_CHECK: a broken
// invariant of TIDE itself.
#ifndef TIDE_ERROR_H_
#define TIDE_ERROR_H_

#include <stdexcept>
#include <string>
#include <utility>

namespace tide {

enum class ErrorCode {
  kInvalidArgument,  // the caller's mistake; nothing was changed
  kMismatch,         // ranks disagree; raised on every rank, before what they sent is used
  kTimeout,          // a wait passed its deadline
  kPeerDead,         // a rank that others wait for has exited
  kOutOfMemory,      // a reservation does not fit; raised on every rank
  kUnsupported,      // this machine or group can't do it; a stock path exists
  kPoisoned,         // an earlier call failed after data moved
  kInternal,         // a broken invariant
};

// Stable lower-case name, e.g. "peer_dead".
const char* Name(ErrorCode code);

// Where an error happened. Unknown ranks are -1, unknown names empty.
struct ErrorContext {
  int rank = -1;
  int peer = -1;
  std::string group;
  std::string operation;
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, ErrorContext context = {})
      : std::runtime_error(message), code_(code), context_(std::move(context)) {}
  ErrorCode code() const { return code_; }
  const ErrorContext& context() const { return context_; }

 private:
  ErrorCode code_;
  ErrorContext context_;
};

namespace internal {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);
[[noreturn]] void ThrowErrno(const std::string& what);
}  // namespace internal

}  // namespace tide

#define TIDE_CHECK(condition)                                        \
  do {                                                               \
    if (!(condition)) {                                              \
      ::tide::internal::CheckFailed(__FILE__, __LINE__, #condition); \
    }                                                                \
  } while (false)

#endif  // TIDE_ERROR_H_
