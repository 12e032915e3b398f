// The pages of a private mapping that this process has changed, and the way back from them.
//
// Every rank of a node reads a node-shared segment through a private mapping: a page shows the
// shared contents until the rank writes to it, and is the rank's own copy from then on. The kernel
// tells which pages those are in /proc/self/pagemap.
#ifndef TIDE_FABRIC_HOST_PRIVATE_PAGES_H_
#define TIDE_FABRIC_HOST_PRIVATE_PAGES_H_

#include <cstdint>
#include <vector>

#include "fabric/machine/shared_memory.h"

namespace tide::host {

class PrivatePages {
 public:
  // Tries on a mapping of its own that changed pages are found and dropped. Throws Error,
  // typically kUnsupported, if they are not: then nothing may be shared this way.
  PrivatePages();

  // Drops the own copies of pages in [address, address + bytes), both multiples of PageBytes():
  // they show the shared contents again. Returns how many there were.
  int64_t Revert(char* address, int64_t bytes);

 private:
  void TryOut();

  machine::FileDescriptor pagemap_;
  std::vector<uint64_t> entries_;  // one a page; kept to reuse the memory
};

}  // namespace tide::host

#endif  // TIDE_FABRIC_HOST_PRIVATE_PAGES_H_
