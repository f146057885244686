// The messages of operations that fail: of CPU groups, and of kernels on GPUs.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "../kernels/algorithms.h"
#include "../kernels/failure_reason.h"

namespace jax_intranode {

// "2.5 s". No stream of C++ formats it: in a process whose other libraries have brought a C++
// library of their own, a stream may find the wrong locale.
inline std::string Seconds(double seconds) {
  char text[32];
  snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

// "rank 1 (device 5)". `device_ids` are those of the group, in rank order; none if unknown.
inline std::string RankName(const std::vector<int64_t>& device_ids, int rank) {
  const bool known = rank >= 0 && static_cast<size_t>(rank) < device_ids.size();
  const std::string device = known ? std::to_string(device_ids[rank]) : "?";
  return "rank " + std::to_string(rank) + " (device " + device + ")";
}

// A rank gave up an operation while it waited for rank `missing` (-1: for none). `detail` says more
// about the missing rank. The caller appends a sentence on the consequences.
inline std::string FailureMessage(const std::string& operation, FailureReason reason,
                                  double timeout_s, const std::vector<int64_t>& device_ids,
                                  int rank, int missing, const std::string& detail = "") {
  std::string text = "jax_intranode: " + operation, advice;
  switch (reason) {
    case FailureReason::kTimeout:
      text += " timed out after " + Seconds(timeout_s);
      advice =
          " Did that rank fail, or run another program? JAX_INTRANODE_TIMEOUT_S sets the limit.";
      break;
    case FailureReason::kMismatch:
      text += " timed out after " + Seconds(timeout_s);
      advice =
          " All ranks of a group must run the same operations, as often and in the same order.";
      break;
    case FailureReason::kOtherOperation:
      text += " met another operation";
      advice =
          " All ranks of a group must run the same operations, as often and in the same order.";
      break;
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
  text += ": " + RankName(device_ids, rank);
  if (missing >= 0) text += " waited for " + RankName(device_ids, missing) + detail;
  return text + "." + advice;
}

// A rank has waited for long, and goes on waiting. `calls` is how often the call site had been
// called before; -1 if that is not known.
inline std::string WaitMessage(const std::string& operation, int64_t calls, double waited_s,
                               double timeout_s, const std::vector<int64_t>& device_ids, int rank,
                               int missing, const std::string& detail) {
  std::string text = operation;
  if (calls >= 0) text += ", call " + std::to_string(calls + 1) + " at this place,";
  return text + " has waited " + Seconds(waited_s) + ": " + RankName(device_ids, rank) +
         " waits for " + RankName(device_ids, missing) + detail +
         (timeout_s < 1e9
              ? ". It fails after " + Seconds(timeout_s) + " (see JAX_INTRANODE_TIMEOUT_S)."
              : ". It waits without a limit.");
}

// What messages call an operation.
inline std::string OperationTitle(Algorithm algorithm) {
  const std::string name = OperationName(algorithm);
  return IsAllReduce(algorithm) ? name + " (" + AlgorithmName(algorithm) + ")" : name;
}

// The message of a kernel on the GPU with CUDA's number `ordinal`. `call` says more about the
// operation, for instance "of 400 bytes (train.py:10)".
inline std::string KernelFailureMessage(std::string operation, FailureReason reason,
                                        double timeout_s, const std::vector<int64_t>& device_ids,
                                        int rank, int missing, int ordinal, const std::string& call,
                                        const std::string& detail) {
  if (reason == FailureReason::kClosed) {
    return "jax_intranode: a program that was compiled before jax_intranode.shutdown() was "
           "replayed from a CUDA graph, on CUDA device " +
           std::to_string(ordinal) +
           ". The CUDA context is lost; restart the program, and call jax.clear_caches() after "
           "jax_intranode.shutdown().";
  }
  if (!call.empty()) operation += " " + call;
  return FailureMessage(operation, reason, timeout_s, device_ids, rank, missing, detail) +
         " The CUDA context is lost; restart the program.";
}

}  // namespace jax_intranode
