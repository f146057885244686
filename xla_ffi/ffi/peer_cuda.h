// The handlers behind calls on peer buffers on GPUs (jax_intranode/include).
#pragma once

#include "communicator_cuda.h"
#include "peer_buffers.h"

namespace jax_intranode {

using DevicePeerBuffer = PeerBuffer<DeviceCommunicator>;
using DevicePeerBuffers = PeerBuffers<DeviceCommunicator>;

// What libraries for GPUs get.
extern const v1::Api kDevicePeerApi;

XLA_FFI_Error* CudaPeerInstantiate(XLA_FFI_CallFrame* frame);

// Ends a buffer: handlers refuse it from now on, and kernels that are replayed give up. Waits for
// what runs on its devices.
void ClosePeerBuffer(const std::string& name);

}  // namespace jax_intranode
