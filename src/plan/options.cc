#include <fmt/format.h>

#include "tide/error.h"
#include "tide/plan.h"

namespace tide {

const char* Name(Placement placement) {
  return placement == Placement::kDirect ? "direct" : "latin_square";
}

const char* Name(Mode mode) { return mode == Mode::kInPlace ? "in_place" : "slot_reuse"; }

Placement ParsePlacement(const std::string& word) {
  for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
    if (word == Name(placement)) return placement;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("placement: expected 'direct' or 'latin_square', got '{}'", word));
}

Mode ParseMode(const std::string& word) {
  for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
    if (word == Name(mode)) return mode;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("mode: expected 'in_place' or 'slot_reuse', got '{}'", word));
}

}  // namespace tide
