// The record that a kernel writes when it gives up, or waits for long. It lies in host memory,
// which outlives the kernel's context.
#pragma once

#include <cstdint>

#include "../../jax_intranode/include/jax_intranode/peer_types.h"
#include "../kernels/failure_reason.h"
#include "../kernels/ragged_call.h"

namespace jax_intranode {

// One record per communicator and device. The kernel that gives up writes it once, except for
// `wait`. The host only reads it, except for `abort`.
struct FailureRecord : v1::PeerRecord {
  uint32_t algorithm;
  uint64_t other;     // what the missing rank runs (kernels/same_operation.h), if reason says so
  UpdateFault fault;  // kBadUpdate
};
static_assert(v1::kTimedOut == static_cast<uint32_t>(FailureReason::kTimeout) &&
              v1::kAborted == static_cast<uint32_t>(FailureReason::kAborted) &&
              v1::kBusy == static_cast<uint32_t>(FailureReason::kBusy) &&
              v1::kClosed == static_cast<uint32_t>(FailureReason::kClosed));

// What `wait` of a record holds.
struct LongWait {
  uint32_t site;
  int missing;
  double seconds;
};
inline LongWait UnpackWait(uint64_t wait) {
  return {static_cast<uint32_t>(wait), static_cast<int>(wait >> 32 & 0xFF),
          static_cast<double>(wait >> 40) / 100};
}

}  // namespace jax_intranode
