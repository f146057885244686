// The FFI handlers of the collectives on the CPU. All operations share them; the attribute
// `algorithm` says which operation it is.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <utility>

#include "../host/host_group.h"
#include "common.h"

namespace jax_intranode {

// The groups of one partition that have ranks in this process.
struct HostCommunicator {
  struct Member {
    std::shared_ptr<HostGroup> group;
    int rank;
  };
  std::map<int64_t, Member> members;  // by global device id
  bool is_cube_mesh = false;          // whether the groups are hybrid cube meshes
};

extern std::atomic<uint64_t> host_handler_calls;

// A compilation has ended: sites that are instantiated from now on belong to another program.
void EndCompilation();

XLA_FFI_Error* HostCollectiveInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* HostCollective(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* HostNormInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* HostNorm(XLA_FFI_CallFrame* frame);

}  // namespace jax_intranode
