// NCCL, loaded at run time as a copy of TIDE's own: torch brings one that is too old, and both work
// side by side.
#ifndef TIDE_FABRIC_NCCL_NCCL_LIBRARY_H_
#define TIDE_FABRIC_NCCL_NCCL_LIBRARY_H_

#include <memory>
#include <string>

#include "fabric/nccl/device.h"

namespace tide::nccl {

// Contexts and signal indices came with 2.31.2; the release before it corrupts data of windows that
// do not start at an allocation.
inline constexpr int kOldestNccl = 23102;

// "2.31.2" for 23102.
std::string NcclVersionText(int version);

// The library at `path`; with an empty path the one that is loaded already. Throws
// Error(kUnsupported) with the reason and what to do.
std::shared_ptr<NcclLibrary> LoadNccl(const std::string& path);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_NCCL_LIBRARY_H_
