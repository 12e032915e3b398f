// The functions of NCCL that TIDE calls, found with dlsym. Declared by NCCL's own headers.
#ifndef TIDE_FABRIC_NCCL_NCCL_TABLE_H_
#define TIDE_FABRIC_NCCL_NCCL_TABLE_H_

#include <nccl.h>
#include <nccl_device/host.h>

#include <string>

namespace tide::nccl {

struct NcclTable {
  std::string path;
  int version = 0;

  decltype(&ncclGetVersion) GetVersion = nullptr;
  decltype(&ncclGetErrorString) GetErrorString = nullptr;
  decltype(&ncclGetLastError) GetLastError = nullptr;
  decltype(&ncclGetUniqueId) GetUniqueId = nullptr;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig = nullptr;
  decltype(&ncclCommSplit) CommSplit = nullptr;
  decltype(&ncclCommDestroy) CommDestroy = nullptr;
  decltype(&ncclCommQueryProperties) CommQueryProperties = nullptr;
  decltype(&ncclMemAlloc) MemAlloc = nullptr;
  decltype(&ncclMemFree) MemFree = nullptr;
  decltype(&ncclCommWindowRegister) CommWindowRegister = nullptr;
  decltype(&ncclCommWindowDeregister) CommWindowDeregister = nullptr;
  decltype(&ncclGetPeerDevicePointer) GetPeerDevicePointer = nullptr;
  decltype(&ncclGroupStart) GroupStart = nullptr;
  decltype(&ncclGroupEnd) GroupEnd = nullptr;
  decltype(&ncclPutSignal) PutSignal = nullptr;
  decltype(&ncclSignal) Signal = nullptr;
  decltype(&ncclWaitSignal) WaitSignal = nullptr;

  // Throws tide::Error with NCCL's words.
  void Check(ncclResult_t result, const char* what, ncclComm_t comm = nullptr) const;
};

// See LoadNccl.
NcclTable LoadNcclTable(const std::string& path);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_NCCL_TABLE_H_
