// Streams that don't hold up the caller's.
//
// A GPU has at most 32 hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), and torch alone
// makes more streams than that. Streams of one queue run as one: while the first waits for a peer,
// the kernels of the other stand still. The driver does not say which queue a stream is in, so it
// is tried out, once, when a communicator is made; streams cost nothing afterwards.
#ifndef TIDE_FABRIC_NCCL_STREAM_SEARCH_H_
#define TIDE_FABRIC_NCCL_STREAM_SEARCH_H_

#include <functional>
#include <vector>

#include "fabric/nccl/device.h"

namespace tide::nccl {

struct FoundStreams {
  std::vector<Stream> streams;  // the caller's to destroy
  int aliases = 0;              // those among them that share a hardware queue with compute
};

// Makes `count` streams, any of which may wait for a peer: that share no hardware queue with the
// `compute` streams, nor with each other if there are enough. Blocks until the compute streams have
// run what they hold; `wait` returns when an event is reached, or throws.
FoundStreams FindStreams(Device& device, const std::vector<Stream>& compute, int count,
                         const std::function<void(EventHandle)>& wait);

}  // namespace tide::nccl

#endif  // TIDE_FABRIC_NCCL_STREAM_SEARCH_H_
