// What the watch of the peers (peer_watch.h) says to the communicators of a platform.
//
// The watch lives in the module _host. The communicators of GPUs live in _cuda, another shared
// library, so the sink is plain functions behind a pointer that Python carries over.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_intranode {

enum class PeerState : int {
  kPresent = 0,
  // It has ended in order: no fault, but who waits for it waits in vain.
  kGone = 1,
  // It does not run. Who waits for it gives up. It may come back.
  kStopped = 2,
  // It is lost by a fault: every call of its groups fails.
  kDead = 3,
};

struct PeerSink {
  // The process that has the devices `ids` (global ids) is in `state`; `what` is a clause like
  // "process 1 (pid 7) has called jax_intranode.shutdown()".
  void (*on_peer)(PeerState state, const int64_t* ids, size_t count, const char* what);
};

constexpr char kPeerSinkName[] = "jax_intranode.PeerSink";

}  // namespace jax_intranode
