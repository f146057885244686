#include "communicator_host.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "platform_host.h"
#include "site.h"

namespace jax_intranode {

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
    const Links of_rank = LinksOf(links, member, partition.size);
    auto& group = groups[member.group];
    if (!group) {
      std::vector<int>& ranks = local_ranks[member.group];
      std::sort(ranks.begin(), ranks.end());
      group =
          std::make_shared<HostGroup>(GroupOf(member, partition.size, epoch_buffer_bytes), ranks,
                                      DeviceIdsOf(partition, member.group), timeout, memory);
    }
    communicator->members[member.device] = {group, member.rank, of_rank};
  }
  HostPlatform::Get().Add(partition, std::move(communicator));
}

void CloseHostCommunicators() {
  for (const auto& [partition, communicator] : Registry<HostCommunicator>::Get().All()) {
    for (const auto& [device, member] : communicator->members) member.group->Fail(kShutDown);
  }
  Registry<HostCommunicator>::Get().Clear();
}

}  // namespace jax_intranode
