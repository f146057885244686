// The handlers behind calls on peer buffers on CPU devices (jax_intranode/include).
#pragma once

#include "communicator_host.h"
#include "peer_buffers.h"

namespace jax_intranode {

using HostPeerBuffers = PeerBuffers<HostCommunicator>;

// What libraries for CPU devices get.
extern const v1::Api kHostPeerApi;

XLA_FFI_Error* HostPeerInstantiate(XLA_FFI_CallFrame* frame);

}  // namespace jax_intranode
