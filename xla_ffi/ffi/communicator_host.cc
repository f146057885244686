#include "communicator_host.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <utility>

#include "platform_host.h"
#include "site.h"

namespace jax_intranode {
namespace {

// Guards the count: an operation counts either for its communicator or as past.
std::mutex operations_mutex;
uint64_t past_operations = 0;  // of closed communicators

uint64_t OperationsNow() {
  uint64_t total = 0;
  for (const auto& [partition, communicator] : Registry<HostCommunicator>::Get().All()) {
    std::set<HostGroup*> groups;
    for (const auto& [device, member] : communicator->members) groups.insert(member.group.get());
    for (HostGroup* group : groups) total += group->operations();
  }
  return total;
}

}  // namespace

void CreateHostCommunicator(const Partition& partition, const std::vector<GroupMember>& members,
                            size_t epoch_buffer_bytes, double timeout_s,
                            std::shared_ptr<void> memory, const std::vector<LinksOfGroup>& links) {
  const auto timeout = std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9));
  std::map<int64_t, std::vector<int>> local_ranks;
  for (const GroupMember& member : members) local_ranks[member.group].push_back(member.rank);
  auto communicator = std::make_shared<HostCommunicator>();
  communicator->is_cube_mesh = !links.empty();
  std::map<int64_t, std::shared_ptr<HostGroup>> groups;
  for (const GroupMember& member : members) {
    auto& group = groups[member.group];
    if (!group) {
      std::vector<int>& ranks = local_ranks[member.group];
      std::sort(ranks.begin(), ranks.end());
      group = std::make_shared<HostGroup>(GroupOf(member, partition.second, epoch_buffer_bytes),
                                          ranks, DeviceIdsOf(partition, member.group), timeout,
                                          memory, LinksOf(links, member.group, partition.second));
    }
    communicator->members[member.device] = {group, member.rank};
  }
  HostPlatform::Get().Add(partition, std::move(communicator));
}

uint64_t HostOperations() {
  std::lock_guard lock(operations_mutex);
  return past_operations + OperationsNow();
}

void CloseHostCommunicators() {
  std::lock_guard lock(operations_mutex);
  for (const auto& [partition, communicator] : Registry<HostCommunicator>::Get().All()) {
    for (const auto& [device, member] : communicator->members) member.group->Fail(kShutDown);
  }
  past_operations += OperationsNow();
  Registry<HostCommunicator>::Get().Clear();
}

}  // namespace jax_intranode
