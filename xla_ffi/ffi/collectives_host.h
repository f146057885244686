// The FFI handlers of the collectives on the CPU. All operations have one: the algorithm, an
// attribute, says which.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <utility>

#include "../host/host_group.h"
#include "common.h"

namespace jax_intranode {

// The groups of one partition, of which this process has members.
struct HostCommunicator {
  struct Member {
    std::shared_ptr<HostGroup> group;
    int rank;
  };
  std::map<int64_t, Member> members;  // by global device id
};

extern std::atomic<uint64_t> host_handler_calls;

// A program has been compiled: what is instantiated from now on belongs to another one.
void EndCompilation();

XLA_FFI_Error* HostCollectiveInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* HostCollective(XLA_FFI_CallFrame* frame);

}  // namespace jax_intranode
