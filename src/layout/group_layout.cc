#include <algorithm>
#include <utility>

#include "tide/error.h"
#include "tide/layout.h"

namespace tide {

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
