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
  throw Error(code, fmt::format("{}: {} ({})", what, GetErrorString(result), GetLastError(comm)));
}

NcclTable LoadNcclTable(const std::string& path) {
  void* handle = Open(path);
  NcclTable table;
  table.path = path;
  Find(handle, "ncclGetVersion", table, &table.GetVersion);
  table.path = PathOf(reinterpret_cast<const void*>(table.GetVersion));
  Find(handle, "ncclGetErrorString", table, &table.GetErrorString);
  Find(handle, "ncclGetLastError", table, &table.GetLastError);
  table.Check(table.GetVersion(&table.version), "asking NCCL for its version");
  if (table.version < kOldestNccl) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("expected NCCL {} or newer, got {} from {}: {}", NcclVersionText(kOldestNccl),
                    NcclVersionText(table.version), table.path, kInstall));
  }
  Find(handle, "ncclGetUniqueId", table, &table.GetUniqueId);
  Find(handle, "ncclCommInitRankConfig", table, &table.CommInitRankConfig);
  Find(handle, "ncclCommSplit", table, &table.CommSplit);
  Find(handle, "ncclCommDestroy", table, &table.CommDestroy);
  Find(handle, "ncclCommQueryProperties", table, &table.CommQueryProperties);
  Find(handle, "ncclMemAlloc", table, &table.MemAlloc);
  Find(handle, "ncclMemFree", table, &table.MemFree);
  Find(handle, "ncclCommWindowRegister", table, &table.CommWindowRegister);
  Find(handle, "ncclCommWindowDeregister", table, &table.CommWindowDeregister);
  Find(handle, "ncclGetPeerDevicePointer", table, &table.GetPeerDevicePointer);
  Find(handle, "ncclGroupStart", table, &table.GroupStart);
  Find(handle, "ncclGroupEnd", table, &table.GroupEnd);
  Find(handle, "ncclPutSignal", table, &table.PutSignal);
  Find(handle, "ncclSignal", table, &table.Signal);
  Find(handle, "ncclWaitSignal", table, &table.WaitSignal);
  return table;
}

}  // namespace tide::nccl
