// The failure of an operation: one record for CPU devices and for GPUs, and its text.
//
// Who finds a failure fills in what it knows. The monitor (monitor.h) adds the text and hands the
// record to Python, whose Failure (jax_intranode/_src/health/failures.py) has the same fields.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/failure_reason.h"
#include "call_sites.h"

namespace jax_intranode {

// A rank's call, as messages name it.
struct Call {
  std::string operation{};            // for instance "psum"; empty if none was running
  std::string title{};                // what messages call it, if that is more
  uint64_t bytes = 0;                 // of its operand on one device; 0: not known
  std::string site{};                 // text of the call site; empty if it is not known
  bool shared = false;                // whether several calls have this text
  int64_t calls = -1;                 // how often the site had been called before; -1: not known
  int rank = -1;                      // that waited
  int missing = -1;                   // that it waited for; -1: none, or one that does not exist
  std::vector<int64_t> device_ids{};  // of the group, in rank order
  uint64_t group = 0;                 // names it, in all processes
  double limit_s = 0;                 // how long it may wait
  std::string detail{};               // the end of a sentence on the missing rank

  std::string Name() const {
    return CallSites::Get().NameOf(site, shared, title.empty() ? operation : title, bytes);
  }
};

struct Failure : Call {
  Failure() = default;
  explicit Failure(FailureReason why, Call call = {}) : Call(std::move(call)), reason(why) {}

  FailureReason reason = FailureReason::kNone;
  bool on_gpu = false;
  int process = -1;  // the missing process; -1: not known
  std::string message{};
};

// "2.5 s". No stream of C++ formats it: in a process whose other libraries have brought a C++
// library of their own, a stream may find the wrong locale.
inline std::string Seconds(double seconds) {
  char text[32];
  snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

// "rank 1 (device 5)". `device_ids` are those of the group, in rank order.
inline std::string RankName(const std::vector<int64_t>& device_ids, int rank) {
  if (static_cast<size_t>(rank) >= device_ids.size()) return "an unknown rank";
  return "rank " + std::to_string(rank) + " (device " + std::to_string(device_ids[rank]) + ")";
}

inline std::string TextOf(const Failure& failure) {
  constexpr char kRule[] =
      " All ranks of a group must run the same operations, as often and in the same order.";
  const char* const end = failure.on_gpu ? " The CUDA context is lost; restart the program."
                                         : " This group of devices can't be used any more.";
  std::string text = "jax_intranode: " + failure.Name();
  std::string advice;
  switch (failure.reason) {
    case FailureReason::kClosed:
      return "jax_intranode: a program was replayed from a CUDA graph after "
             "jax_intranode.shutdown(), or after close() of a peer buffer that it uses. The CUDA "
             "context is lost; restart the program. Call jax.clear_caches() after shutdown().";
    case FailureReason::kTimeout:
      text += " timed out after " + Seconds(failure.limit_s);
      advice =
          " Did that rank fail, or run another program? JAX_INTRANODE_TIMEOUT_S sets the limit.";
      break;
    case FailureReason::kMismatch:
      text += " timed out after " + Seconds(failure.limit_s);
      advice = kRule;
      break;
    case FailureReason::kOtherOperation:
      text += " met another operation";
      advice = kRule;
      break;
    case FailureReason::kBadUpdate:
      return text + " failed: " + failure.detail + "." + end;
    case FailureReason::kAborted:
      text += " was aborted";
      break;
    case FailureReason::kBusy:
      text += " found another operation in flight";
      advice =
          " Operations of one group, and collective matmuls of one device, must run one after "
          "another, on one stream.";
      break;
    default:
      text += " failed";
  }
  text += ": " + RankName(failure.device_ids, failure.rank);
  if (failure.reason != FailureReason::kBusy) {
    text += " waited for " + RankName(failure.device_ids, failure.missing) + failure.detail;
  }
  return text + "." + advice + end;
}

// The text of a failure that no call was waiting for. `what` says what became of the process.
inline std::string LostText(const std::string& what, bool on_gpu) {
  return "jax_intranode: " + what + ". " +
         (on_gpu ? "Restart all processes from the last checkpoint."
                 : "Restart all processes, or call jax_intranode.shutdown() in those that are left "
                   "and go on with their devices.");
}

}  // namespace jax_intranode
