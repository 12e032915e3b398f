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

  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommSplit) comm_split = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommQueryProperties) comm_query_properties = nullptr;
  decltype(&ncclMemAlloc) mem_alloc = nullptr;
  decltype(&ncclMemFree) mem_free = nullptr;
  decltype(&ncclCommWindowRegister) comm_window_register = nullptr;
  decltype(&ncclCommWindowDeregister) comm_window_deregister = nullptr;
  decltype(&ncclGetPeerDevicePointer) get_peer_device_pointer = nullptr;
  decltype(&ncclGetLsaMultimemDevicePointer) get_lsa_multimem_device_pointer = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclPutSignal) put_signal = nullptr;
  decltype(&ncclSignal) signal = nullptr;
  decltype(&ncclWaitSignal) wait_signal = nullptr;

  // Throws tide::Error with NCCL's words.
  void Check(ncclResult_t result, const char* what, ncclComm_t comm = nullptr) const;
};

// See LoadNccl.
NcclTable LoadNcclTable(const std::string& path);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_NCCL_TABLE_H_
