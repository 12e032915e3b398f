// The elements of one operand of a sum, landing or cast, consumed from the front.
#ifndef TIDE_VERIFY_OPERAND_H_
#define TIDE_VERIFY_OPERAND_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "verify/memory.h"

namespace tide::verify {

class Operand {
 public:
  Operand(Place place, int rank, DType dtype, std::vector<Portion> portions)
      : place_(place), rank_(rank), dtype_(dtype), portions_(std::move(portions)) {}

  int rank() const { return rank_; }
  DType dtype() const { return dtype_; }
  // Where the front lies.
  Place position() const { return place_; }
  void MustBeZero() { must_be_zero_ = true; }
  bool must_be_zero() const { return must_be_zero_; }

  Value front() const { return portions_[at_].value.After(used_); }
  // Whole elements that the front stands for.
  int64_t elems() const { return bytes() / item(); }
  // Whether the front is whole elements of the right type.
  bool aligned() const {
    const Value value = front();
    return bytes() % item() == 0 &&
           (value.uniform() || (value.dtype == dtype_ && value.origin % item() == 0));
  }
  void Take(int64_t elems) {
    used_ += elems * item();
    place_.offset += elems * item();
    if (used_ == portions_[at_].bytes) {
      ++at_;
      used_ = 0;
    }
  }

 private:
  int64_t item() const { return static_cast<int64_t>(ItemSize(dtype_)); }
  int64_t bytes() const { return portions_[at_].bytes - used_; }

  Place place_;
  int rank_;
  DType dtype_;
  bool must_be_zero_ = false;
  std::vector<Portion> portions_;
  size_t at_ = 0;
  int64_t used_ = 0;
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_OPERAND_H_
