#include "communicator_cuda.h"

#include <map>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <utility>

#include "../cuda/pipelined_matmul.h"
#include "../cuda/slab.h"
#include "platform_cuda.h"

namespace jax_intranode {
namespace {

// Calls `act(communicator, device, group)` for each region of the communicators that are open.
template <class Act>
void ForEachDevice(const Act& act) {
  for (const auto& [partition, communicator] : Registry<DeviceCommunicator>::Get().All()) {
    for (const auto& [device, member] : communicator->members) {
      act(*communicator, device, member.group);
    }
  }
}

// Guards the count: an operation counts either for its communicator or as past.
std::mutex operations_mutex;
uint64_t past_operations = 0;  // of closed communicators

// The number of operations in a region of a device. The count has 32 bits: the sum is right if it
// is read at least once in 2^32 operations.
uint64_t OperationsNow(DeviceCommunicator& communicator, int device, const DeviceGroup& group) {
  auto& [last, count] = communicator.counted[group.Header()];
  const uint32_t now = ReadWord(device, reinterpret_cast<uintptr_t>(&group.Header()->operations));
  count += static_cast<uint32_t>(now - last);
  last = now;
  return count;
}

void Synchronize(int device) {
  const CurrentDevice current(device);
  ThrowIfError(cudaDeviceSynchronize(), "waiting for a device");
}

}  // namespace

void CreateDeviceCommunicator(const Partition& partition, const std::vector<GroupMember>& members,
                              size_t epoch_buffer_bytes, double timeout_s,
                              std::shared_ptr<void> memory,
                              const std::vector<LinksOfGroup>& links) {
  auto communicator = std::make_shared<DeviceCommunicator>();
  communicator->is_cube_mesh = !links.empty();
  communicator->memory = std::move(memory);
  for (const GroupMember& member : members) {
    DeviceGroup group{GroupOf(member, partition.size, epoch_buffer_bytes)};
    const Links of_rank = LinksOf(links, member, partition.size);
    if (!links.empty()) group = WithoutUnlinked(group, of_rank);
    group.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
    group.failure = new (reinterpret_cast<void*>(member.record)) FailureRecord{};
    communicator->members[static_cast<int32_t>(member.device)] = {
        group, DeviceIdsOf(partition, member.group), of_rank};
    ClosingStreamOf(static_cast<int>(member.device));
  }
  CudaPlatform::Get().AddNew(
      [&] { return Registry<DeviceCommunicator>::Get().Add(partition, std::move(communicator)); });
}

void AddRings(const Partition& partition,
              const std::vector<std::pair<int64_t, std::vector<uintptr_t>>>& rings,
              size_t ring_bytes) {
  const auto communicator = Registry<DeviceCommunicator>::Get().Find(partition);
  if (!communicator) throw std::invalid_argument("jax_intranode: rings without a communicator");
  for (const auto& [device, addresses] : rings) {
    DeviceCommunicator::Member& member = communicator->members.at(static_cast<int32_t>(device));
    member.matmul = {static_cast<int>(device), member.group, {}, ring_bytes};
    CopyAddresses({.addresses = addresses}, partition.size, member.matmul->ring);
    CreateSideStreams(member.matmul->device);
  }
}

cudaStream_t ClosingStreamOf(int device) {
  static std::mutex mutex;
  static auto* const streams = new std::map<int, cudaStream_t>;
  std::lock_guard lock(mutex);
  cudaStream_t& stream = (*streams)[device];
  if (stream == nullptr) {
    const CurrentDevice current(device);
    ThrowIfError(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  }
  return stream;
}

bool CloseNow(int device, uint32_t* closed) {
  try {
    Synchronize(device);
    WriteWord(device, reinterpret_cast<uintptr_t>(closed), 1);
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

void SynchronizeDevices() {
  std::set<int> devices;
  Registry<DeviceCommunicator>::Get().ForEachAlive([&](auto&, const auto& communicator) {
    for (const auto& [device, member] : communicator.members) devices.insert(device);
  });
  for (const int device : devices) Synchronize(device);
}

uint64_t DeviceOperations() {
  std::lock_guard lock(operations_mutex);
  uint64_t total = past_operations;
  ForEachDevice([&](DeviceCommunicator& communicator, int device, const DeviceGroup& group) {
    total += OperationsNow(communicator, device, group);
  });
  return total;
}

void CloseDeviceCommunicators() {
  std::lock_guard lock(operations_mutex);
  ForEachDevice([](DeviceCommunicator& communicator, int, const DeviceGroup&) {
    communicator.closed = true;
  });
  ForEachDevice([](DeviceCommunicator& communicator, int device, const DeviceGroup& group) {
    if (CloseNow(device, &group.Header()->closed)) OperationsNow(communicator, device, group);
    past_operations += communicator.counted[group.Header()].second;
  });
  Registry<DeviceCommunicator>::Get().Clear();
}

}  // namespace jax_intranode
