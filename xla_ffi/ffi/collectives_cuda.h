// The FFI handlers of the collectives on CUDA. All operations share them; the attribute `algorithm`
// says which operation it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../cuda/collectives.h"
#include "../cuda/matmul_call.h"
#include "common.h"

namespace jax_intranode {

// The groups of one partition, as the devices of this process see them.
struct DeviceCommunicator {
  std::vector<std::optional<DeviceGroup>> members;  // by CUDA device ordinal
  std::vector<std::optional<MatmulMember>> matmul_members;
  std::vector<std::vector<int64_t>> groups;  // the device ids of each member's group
  std::shared_ptr<void> memory;              // owns what the groups point to
  bool is_cube_mesh = false;                 // whether the groups are hybrid cube meshes
  std::atomic<bool> closed{false};

  // Why a call on a device can't run; empty if it can. A call that is refused because a peer has
  // left has no kernel that could write a record, so it is noted here.
  std::string Refuse(int32_t device) {
    std::lock_guard lock(mutex);
    if (failure_message.empty() && !left_message.empty()) refused = {device, left_message};
    return failure_message.empty() ? left_message : failure_message;
  }
  std::string failure() const {
    std::lock_guard lock(mutex);
    return failure_message.empty() ? left_message : failure_message;
  }
  // The last call that was refused because a peer has left, once.
  std::optional<std::pair<int32_t, std::string>> TakeRefused() {
    std::lock_guard lock(mutex);
    return std::exchange(refused, std::nullopt);
  }
  // No call runs any more, for good.
  void set_failure(const std::string& message) {
    std::lock_guard lock(mutex);
    if (failure_message.empty()) failure_message = message;
  }
  void set_left(const std::string& message) {
    std::lock_guard lock(mutex);
    left_message = message;
  }

  mutable std::mutex mutex;
  std::string failure_message;
  std::string left_message;
  std::optional<std::pair<int32_t, std::string>> refused;  // CUDA device, message
  // By device: the last epoch that was read, and the number of operations until then.
  std::map<size_t, std::pair<uint32_t, uint64_t>> counted;
};

extern std::atomic<uint64_t> device_handler_calls;

// Why an operation can't run on a device; success if it can.
ffi::Error CheckUsable(DeviceCommunicator& communicator, int32_t device);

// What a handler returns. After an error the rank has not made this call, but its peers may have,
// so its next one would take their data of this one. Hence no later call of the communicator runs:
// handlers refuse it; what waits on the devices of this process ends; and what is replayed on this
// device, where no handler is called, finds its region closed.
ffi::Error Launched(DeviceCommunicator& communicator, int32_t device, cudaStream_t stream,
                    ffi::Error error);

XLA_FFI_Error* CudaCollectiveInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaCollective(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaNormInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaNorm(XLA_FFI_CallFrame* frame);

}  // namespace jax_intranode
