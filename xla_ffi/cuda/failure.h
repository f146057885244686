// The record that a kernel leaves when it gives up, in host memory that outlives its context.
#pragma once

#include <cstdint>

namespace jax_intranode {

enum class FailureReason : uint32_t {
  kNone = 0,
  kTimeout = 1,  // the deadline passed while packets of a rank were missing
  kAborted = 2,  // the host asked the kernels of this device to end
  kBusy = 3,     // another operation was in flight on the same communicator and device
  kClosed = 4,   // a program from before shutdown() was replayed
};

// One per communicator and device, in mapped host memory. The kernel that gives up writes it once;
// the host reads it and never writes, but for `abort`.
struct FailureRecord {
  uint32_t reason;  // written last
  uint32_t algorithm;
  int32_t rank;
  int32_t missing;   // the rank that was waited for, -1 if none
  uint32_t claimed;  // the first thread to give up sets it
  uint32_t abort;    // the host sets it: every wait on this device ends
};

}  // namespace jax_intranode
