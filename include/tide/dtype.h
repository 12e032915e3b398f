// Element types that TIDE moves, casts and sums.
//
// Values are part of the binding interface: do not renumber.
#ifndef TIDE_DTYPE_H_
#define TIDE_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace tide {

enum class DType : uint8_t { kU8 = 0, kBF16 = 1, kF16 = 2, kF32 = 3 };

// Bytes of one element.
constexpr size_t ItemSize(DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return 1;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF32:
      return 4;
  }
  return 0;
}

constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return "u8";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "fp16";
    case DType::kF32:
      return "fp32";
  }
  return "?";
}

}  // namespace tide

#endif  // TIDE_DTYPE_H_
