#include <algorithm>
#include <utility>

#include "tide/error.h"
#include "tide/layout.h"

namespace tide {
namespace {

// Bytes of a landing. Far above any machine, and far enough below 2^63 for sums of regions.
constexpr int64_t kMaxLandingBytes = int64_t{1} << 56;

// Throws unless the parameter, padded, fits behind the `used` bytes of its group's landing.
void CheckSize(const std::string& group, const ParamShape& shape, int ranks, int64_t used) {
  const int64_t row_bytes =
      std::min(shape.row_elems, kMaxLandingBytes) * static_cast<int64_t>(ItemSize(shape.dtype));
  const int64_t room = (kMaxLandingBytes - used) / std::max<int64_t>(row_bytes, 1);
  if (shape.rows <= room - ranks) return;
  throw Error(ErrorCode::kInvalidArgument,
              "group '" + group + "', parameter '" + shape.name + "': expected at most " +
                  std::to_string(kMaxLandingBytes) + " bytes a group, got " +
                  std::to_string(shape.rows) + " rows of " + std::to_string(shape.row_elems) +
                  " elements after " + std::to_string(used) + " bytes");
}

}  // namespace

GroupLayout::GroupLayout(std::string name, const std::vector<ParamShape>& shapes, int ranks)
    : name_(std::move(name)), ranks_(ranks) {
  if (ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "group '" + name_ + "': expected at least 1 rank, got " + std::to_string(ranks));
  }
  params_.reserve(shapes.size());
  for (const ParamShape& shape : shapes) {
    if (shape.rows < 0 || shape.row_elems < 0) {
      throw Error(ErrorCode::kInvalidArgument, "group '" + name_ + "', parameter '" + shape.name +
                                                   "': expected rows and row_elems >= 0, got " +
                                                   std::to_string(shape.rows) + " and " +
                                                   std::to_string(shape.row_elems));
    }
    CheckSize(name_, shape, ranks, landing_bytes_);
    ParamLayout param;
    param.shape = shape;
    param.shard_rows = (shape.rows + ranks - 1) / ranks;
    param.shard_elems = param.shard_rows * shape.row_elems;
    param.shard_bytes = param.shard_elems * static_cast<int64_t>(ItemSize(shape.dtype));
    param.landing_offset = landing_bytes_;
    landing_bytes_ += AlignUp(param.shard_bytes * ranks, kLandingAlignment);
    params_.push_back(std::move(param));
  }
}

int64_t GroupLayout::LandingOffset(int param, int rank) const {
  const ParamLayout& p = params_[static_cast<size_t>(param)];
  return p.landing_offset + rank * p.shard_bytes;
}

int64_t GroupLayout::LiveRows(int param, int rank) const {
  const ParamLayout& p = params_[static_cast<size_t>(param)];
  return std::clamp<int64_t>(p.shape.rows - rank * p.shard_rows, 0, p.shard_rows);
}

int64_t GroupLayout::LiveElems(int param, int rank) const {
  return LiveRows(param, rank) * params_[static_cast<size_t>(param)].shape.row_elems;
}

}  // namespace tide
