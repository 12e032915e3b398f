#include "fabric/nccl/nccl_table.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "fabric/nccl/nccl_library.h"
#include "tide/error.h"

namespace tide::nccl {
namespace {

constexpr const char* kInstall =
    "run `tide nccl install`, or set TIDE_NCCL_LIBRARY to a libnccl.so.2 of 2.31.2 or newer";

// Never closed: communicators and threads of it may outlive everything else.
void* Open(const std::string& path) {
  // RTLD_DEEPBIND: its own symbols come before those of another NCCL in the process.
  void* handle = path.empty() ? dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)
                              : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (handle != nullptr) return handle;
  if (path.empty()) {
    throw Error(ErrorCode::kUnsupported, fmt::format("no NCCL was found: {}", kInstall));
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("NCCL could not be loaded ({}): {}", dlerror(), kInstall));
}

template <typename Function>
void Find(void* handle, const char* name, const NcclTable& table, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  if (*function == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} has no function {}: {}", table.path, name, kInstall));
  }
}

std::string PathOf(const void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname
                                                                   : "libnccl.so.2";
}

}  // namespace

std::string NcclVersionText(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void NcclTable::Check(ncclResult_t result, const char* what, ncclComm_t comm) const {
  if (result == ncclSuccess) return;
  const ErrorCode code =
      result == ncclInvalidUsage ? ErrorCode::kUnsupported : ErrorCode::kInternal;
  throw Error(code,
              fmt::format("{}: {} ({})", what, get_error_string(result), get_last_error(comm)));
}

NcclTable LoadNcclTable(const std::string& path) {
  void* handle = Open(path);
  NcclTable table;
  table.path = path;
  Find(handle, "ncclGetVersion", table, &table.get_version);
  table.path = PathOf(reinterpret_cast<const void*>(table.get_version));
  Find(handle, "ncclGetErrorString", table, &table.get_error_string);
  Find(handle, "ncclGetLastError", table, &table.get_last_error);
  table.Check(table.get_version(&table.version), "asking NCCL for its version");
  if (table.version < kOldestNccl) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("expected NCCL {} or newer, got {} from {}: {}", NcclVersionText(kOldestNccl),
                    NcclVersionText(table.version), table.path, kInstall));
  }
  Find(handle, "ncclGetUniqueId", table, &table.get_unique_id);
  Find(handle, "ncclCommInitRankConfig", table, &table.comm_init_rank_config);
  Find(handle, "ncclCommSplit", table, &table.comm_split);
  Find(handle, "ncclCommDestroy", table, &table.comm_destroy);
  Find(handle, "ncclCommQueryProperties", table, &table.comm_query_properties);
  Find(handle, "ncclMemAlloc", table, &table.mem_alloc);
  Find(handle, "ncclMemFree", table, &table.mem_free);
  Find(handle, "ncclCommWindowRegister", table, &table.comm_window_register);
  Find(handle, "ncclCommWindowDeregister", table, &table.comm_window_deregister);
  Find(handle, "ncclGetPeerDevicePointer", table, &table.get_peer_device_pointer);
  Find(handle, "ncclGetLsaMultimemDevicePointer", table, &table.get_lsa_multimem_device_pointer);
  Find(handle, "ncclGroupStart", table, &table.group_start);
  Find(handle, "ncclGroupEnd", table, &table.group_end);
  Find(handle, "ncclPutSignal", table, &table.put_signal);
  Find(handle, "ncclSignal", table, &table.signal);
  Find(handle, "ncclWaitSignal", table, &table.wait_signal);
  return table;
}

}  // namespace tide::nccl
