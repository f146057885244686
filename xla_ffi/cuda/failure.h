// The record that a kernel leaves when it gives up, in host memory that outlives its context.
#pragma once

#include <cstdint>

#include "../kernels/failure_reason.h"

namespace jax_intranode {

// One per communicator and device, in mapped host memory. The kernel that gives up writes it once;
// the host reads it and never writes, but for `abort`.
struct FailureRecord {
  uint32_t reason;  // a FailureReason; written last
  uint32_t algorithm;
  int32_t rank;
  int32_t missing;   // the rank that was waited for, -1 if none
  uint32_t claimed;  // the first thread to give up sets it
  uint32_t abort;    // the host sets it: every wait on this device ends
};

}  // namespace jax_intranode
