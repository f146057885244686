// The FFI handlers of collectives and norms on CPU devices. All operations share them; the
// attribute `algorithm` says which operation a call is.
#pragma once

#include <atomic>

#include "communicator_host.h"
#include "peer_buffers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_intranode {

extern std::atomic<uint64_t> host_handler_calls;

XLA_FFI_Error* HostCollectiveInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* HostCollective(XLA_FFI_CallFrame* frame);

// peer_host.cc: the handlers behind calls on peer buffers (jax_intranode/include).
using HostPeerBuffers = PeerBuffers<HostCommunicator>;

// What libraries for CPU devices get.
extern const v1::Api kHostPeerApi;

XLA_FFI_Error* HostPeerInstantiate(XLA_FFI_CallFrame* frame);

}  // namespace jax_intranode
