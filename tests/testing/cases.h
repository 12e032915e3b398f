// Shapes and values that every collective's tests share.
#ifndef TIDE_TESTS_TESTING_CASES_H_
#define TIDE_TESTS_TESTING_CASES_H_

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tide/layout.h"

namespace tide::testing {

struct ShapeCase {
  std::string name;
  std::vector<int64_t> rows;  // one a parameter
  int64_t row_elems;
};

inline std::vector<ShapeCase> ShapeCases() {
  return {
      {"uneven", {3, 5, 2}, 3},
      {"empty", {0, 1, 7, 0}, 5},
      {"many", std::vector<int64_t>(257, 1), 1},
      {"odd", {129, 249, 17}, 31},
      {"wide", {64, 2}, 4096},
      {"zero_columns", {4, 4}, 0},
  };
}

inline std::vector<ParamShape> MakeShapes(const ShapeCase& shape, DType dtype) {
  std::vector<ParamShape> shapes;
  for (size_t p = 0; p < shape.rows.size(); ++p) {
    shapes.push_back({"p" + std::to_string(p), shape.rows[p], shape.row_elems, dtype});
  }
  return shapes;
}

inline float BF16ToFloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Round to nearest even; no NaN in the tests that use it.
inline uint16_t FloatToBF16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Random bytes of valid, finite values of `dtype`.
inline std::vector<char> RandomValues(std::mt19937& random, DType dtype, int64_t elems) {
  std::vector<char> bytes(static_cast<size_t>(elems) * ItemSize(dtype));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < elems; ++i) {
    const float value = normal(random);
    char* at = bytes.data() + static_cast<size_t>(i) * ItemSize(dtype);
    if (dtype == DType::kF32) {
      std::memcpy(at, &value, sizeof value);
    } else if (dtype == DType::kBF16) {
      const uint16_t half = FloatToBF16(value);
      std::memcpy(at, &half, sizeof half);
    } else {
      for (size_t b = 0; b < ItemSize(dtype); ++b) at[b] = static_cast<char>(random() & 0x3f);
    }
  }
  return bytes;
}

inline float ValueAt(const std::vector<char>& bytes, DType dtype, int64_t index) {
  const char* at = bytes.data() + static_cast<size_t>(index) * ItemSize(dtype);
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return BF16ToFloat(bits);
}

}  // namespace tide::testing

#endif  // TIDE_TESTS_TESTING_CASES_H_
