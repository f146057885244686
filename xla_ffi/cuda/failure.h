// The record that a kernel writes when it gives up. It lies in host memory, which outlives the
// kernel's context.
#pragma once

#include <cstdint>

#include "../kernels/failure_reason.h"

namespace jax_intranode {

// One record per communicator and device. The kernel that gives up writes it once. The host only
// reads it, except for `abort`.
struct FailureRecord {
  uint32_t reason;  // a FailureReason; written last
  uint32_t algorithm;
  int32_t rank;
  int32_t missing;   // the rank that was waited for, -1 if none
  uint32_t claimed;  // the first thread to give up sets it
  uint32_t abort;    // set by the host: every wait on this device ends
};

}  // namespace jax_intranode
