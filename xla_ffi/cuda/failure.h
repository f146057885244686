// The record that a kernel writes when it gives up, or waits for long. It lies in host memory,
// which outlives the kernel's context.
#pragma once

#include <cstdint>

#include "../kernels/failure_reason.h"

namespace jax_intranode {

// One record per communicator and device. The kernel that gives up writes it once, except for
// `wait`. The host only reads it, except for `abort`.
struct FailureRecord {
  uint32_t reason;  // a FailureReason; written last
  uint32_t algorithm;
  int32_t rank;
  int32_t missing;   // the rank that was waited for, -1 if none
  uint32_t claimed;  // the first thread to give up sets it
  uint32_t abort;    // set by the host: every wait on this device ends
  uint32_t site;     // number of the call site (host/call_sites.h); 0 if it is not known
  // The last wait that was longer than a second. A kernel that still waits writes it again every
  // 10 ms. Its threads may wait for different ranks: one of them is told.
  uint64_t wait;
  uint64_t other;  // what the missing rank runs (kernels/same_operation.h), if reason says so
};

// What `wait` holds.
struct LongWait {
  uint32_t site;
  int missing;
  double seconds;
};

#ifdef __CUDACC__
__device__ inline uint64_t PackWait(uint32_t site, int missing, uint64_t waited_ns) {
  return site | static_cast<uint64_t>(missing & 0xFF) << 32 | (waited_ns / 10'000'000) << 40;
}
#endif

inline LongWait UnpackWait(uint64_t wait) {
  return {static_cast<uint32_t>(wait), static_cast<int>(wait >> 32 & 0xFF),
          static_cast<double>(wait >> 40) / 100};
}

}  // namespace jax_intranode
