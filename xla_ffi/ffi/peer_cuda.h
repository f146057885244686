// The handlers behind calls on peer buffers on GPUs (jax_intranode/include).
#pragma once

#include "collectives_cuda.h"
#include "peer_buffers.h"

namespace jax_intranode {

using DevicePeerBuffers = PeerBuffers<DeviceCommunicator>;

// What libraries for GPUs get.
extern const v1::Api kDevicePeerApi;

XLA_FFI_Error* CudaPeerInstantiate(XLA_FFI_CallFrame* frame);

// Ends a buffer: handlers refuse it from now on, and kernels that are replayed give up. Waits for
// what runs on its devices.
void ClosePeerBuffer(const std::string& name);

// Why no call on a buffer may go on, or that one may: sets the word that waiting kernels look at,
// on the devices for which `concerns` holds.
template <class Concerns>
void SetAbort(uint32_t abort, const Concerns& concerns) {
  for (const auto& buffer : DevicePeerBuffers::Get().Alive()) {
    for (const auto& [device, peers] : buffer->members) {
      if (concerns(buffer->communicator->groups.at(device))) {
        static_cast<volatile v1::PeerRecord*>(peers.record)->abort = abort;
      }
    }
  }
}

}  // namespace jax_intranode
