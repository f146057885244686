// Why a kernel gives up.
#pragma once

#include <cstdint>

namespace jax_intranode {

// X(enumerator, number, name in Python).
#define JIN_FAILURE_REASONS(X)                                                                 \
  X(kNone, 0, "none")                                                                          \
  X(kTimeout, 1, "timeout")    /* the deadline passed while packets of a rank were missing */  \
  X(kAborted, 2, "aborted")    /* the host asked the kernels of this device to end */          \
  X(kBusy, 3, "busy")          /* another operation was in flight on this group and device */  \
  X(kClosed, 4, "closed")      /* a program from before shutdown() was replayed */             \
  X(kMismatch, 5, "mismatch")  /* the deadline passed while a rank was in another operation */ \
  X(kPeerGone, 6, "peer_gone") /* the process of a rank has ended */                           \
  X(kPeerStopped, 7, "peer_stopped")       /* the process of a rank does not run */            \
  X(kOtherOperation, 8, "other_operation") /* a rank has told of another operation */          \
  X(kBadUpdate, 9, "bad_update")           /* a size or an offset of a ragged_all_to_all */

enum class FailureReason : uint32_t {
#define JIN_X(enumerator, number, name) enumerator = number,
  JIN_FAILURE_REASONS(JIN_X)
#undef JIN_X
};

}  // namespace jax_intranode
