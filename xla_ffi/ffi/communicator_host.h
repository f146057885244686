// The communicators of CPU devices: made by Python, used by handlers, seen by the monitor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "../host/host_group.h"
#include "members.h"

namespace jax_intranode {

// The groups of one partition that have ranks in this process.
struct HostCommunicator {
  struct Member {
    std::shared_ptr<HostGroup> group;
    int rank;
    Links links;  // in a hybrid cube mesh
  };
  std::map<int64_t, Member> members;  // by global device id
  bool is_cube_mesh = false;          // whether the groups are hybrid cube meshes
};

// `memory` owns what the groups point to.
void CreateHostCommunicator(const Partition& partition, const std::vector<GroupMember>& members,
                            size_t epoch_buffer_bytes, double timeout_s,
                            std::shared_ptr<void> memory, const std::vector<LinksOfGroup>& links);

// Ends all communicators.
void CloseHostCommunicators();

}  // namespace jax_intranode
