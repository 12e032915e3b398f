// Pretends to be an NCCL that is too old.
int ncclGetVersion(int *version) {
  *version = 22809;
  return 0;
}
const char *ncclGetErrorString(int result) { return result == 0 ? "no error" : "error"; }
const char *ncclGetLastError(void *comm) { return comm == 0 ? "" : "last error"; }
