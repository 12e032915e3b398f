#include "nccl.h"

#include <nanobind/stl/string.h>

#include <string>

#include "tide/config.h"
#include "tide/error.h"
#ifdef TIDE_WITH_NCCL
#include "fabric/fabric.h"
#include "fabric/nccl/make_fabric.h"
#include "fabric/nccl/nccl_library.h"
#include "nccl_memory.h"
#endif

namespace {

[[maybe_unused]] constexpr const char* kNotBuilt =
    "this build has no nccl fabric: nvcc or NCCL's headers were missing when it was configured";

// What a communicator would use, or why there is none.
nanobind::dict FindNccl() {
  nanobind::dict found;
  const std::string path = tide::NcclLibrary();
  found["library"] = path;
#ifdef TIDE_WITH_NCCL
  try {
    found["description"] = tide::nccl::LoadNccl(path)->Description();
    found["reason"] = "";
  } catch (const tide::Error& error) {
    found["description"] = "";
    found["reason"] = error.what();
  }
#else
  found["description"] = "";
  found["reason"] = kNotBuilt;
#endif
  return found;
}

}  // namespace

std::unique_ptr<tide::Communicator> MakeCommunicator(tide::Bootstrap& bootstrap,
                                                     const tide::CommunicatorOptions& options) {
  if (options.fabric == tide::FabricKind::kHost) {
    return std::make_unique<tide::Communicator>(bootstrap, options);
  }
#ifdef TIDE_WITH_NCCL
  return std::make_unique<tide::Communicator>(tide::nccl::MakeNcclFabric(bootstrap, options),
                                              options);
#else
  throw tide::Error(tide::ErrorCode::kUnsupported, kNotBuilt);
#endif
}

void BindNccl(nanobind::module_& m) {
  nanobind::enum_<tide::FabricKind>(m, "Fabric")
      .value("HOST", tide::FabricKind::kHost)
      .value("NCCL", tide::FabricKind::kNccl);
  m.def("nccl", &FindNccl);
#ifdef TIDE_WITH_NCCL
  m.def("nccl_allocation_bytes", [](uintptr_t address) {
    return NcclAllocationBytes(reinterpret_cast<const void*>(address));
  });
#endif
}
