// The communicators of GPUs: made by Python, used by handlers, seen by the monitor.
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
#include "members.h"

namespace jax_intranode {

// The stream of a CUDA device on which memory is closed while XLA captures. It lasts as long as the
// process.
cudaStream_t ClosingStreamOf(int device);

// The groups of one partition, as the devices of this process see them.
struct DeviceCommunicator {
  struct Member {
    DeviceGroup group;
    std::vector<int64_t> device_ids;       // of the group
    Links links{};                         // in a hybrid cube mesh
    std::optional<MatmulMember> matmul{};  // if it has rings
    // Why calls of the group can't run: for good, or because a peer has left. `mutex` guards them.
    std::string failed{}, left{};
    bool refused = false;  // because a peer has left

    const std::string& failure() const { return failed.empty() ? left : failed; }
  };
  std::map<int32_t, Member> members;  // by CUDA device ordinal
  std::shared_ptr<void> memory;       // owns what the groups point to
  bool is_cube_mesh = false;          // whether the groups are hybrid cube meshes
  std::atomic<bool> closed{false};

  // Why a call on a device can't run; empty if it can. A call that is refused because a peer has
  // left has no kernel that could write a record, so it is noted here.
  std::string Refuse(int32_t device) {
    std::lock_guard lock(mutex);
    Member& member = members.at(device);
    if (member.failed.empty() && !member.left.empty()) member.refused = true;
    return member.failure();
  }
  std::string failure(int32_t device) const {
    std::lock_guard lock(mutex);
    return members.at(device).failure();
  }
  // Why a call on a device was refused, once; empty if none was.
  std::string TakeRefused(int32_t device) {
    std::lock_guard lock(mutex);
    Member& member = members.at(device);
    return std::exchange(member.refused, false) ? member.left : "";
  }
  // No call of the device's group runs any more, for good. Other groups go on.
  void set_failure(int32_t device, const std::string& message) {
    std::lock_guard lock(mutex);
    for (auto& [other, member] : members) {
      if (member.device_ids != members.at(device).device_ids) continue;
      if (member.failed.empty()) member.failed = message;
    }
  }
  void set_left(int32_t device, const std::string& message) {
    std::lock_guard lock(mutex);
    members.at(device).left = message;
  }

  mutable std::mutex mutex;
  // By region: the last count that was read, and the number of operations until then.
  std::map<const RegionHeader*, std::pair<uint32_t, uint64_t>> counted;
};

// `memory` owns what the groups point to.
void CreateDeviceCommunicator(const Partition& partition, const std::vector<GroupMember>& members,
                              size_t epoch_buffer_bytes, double timeout_s,
                              std::shared_ptr<void> memory, const std::vector<LinksOfGroup>& links);

// Gives a communicator the ring buffers for collective matmuls, before any program uses it. `rings`
// has those of every rank, by CUDA device ordinal.
void AddRings(const Partition& partition,
              const std::vector<std::pair<int64_t, std::vector<uintptr_t>>>& rings,
              size_t ring_bytes);

// Waits until nothing runs on a device, and closes memory there. False: the CUDA context is lost,
// and nothing runs in it any more.
bool CloseNow(int device, uint32_t* closed);

// Waits until nothing runs on the devices of this process.
void SynchronizeDevices();

// Operations that the devices of this process have executed, replayed ones included.
uint64_t DeviceOperations();

// Ends all communicators. A graph that is replayed afterwards calls no handler, but its kernels
// find the region closed.
void CloseDeviceCommunicators();

}  // namespace jax_intranode
