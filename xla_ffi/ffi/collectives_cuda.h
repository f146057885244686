// The FFI handlers of collectives and norms on GPUs, and those of collective matmuls. All
// operations share them; the attribute `algorithm` says which operation a call is.
#pragma once

#include <atomic>

#include "communicator_cuda.h"
#include "peer_buffers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_intranode {

extern std::atomic<uint64_t> device_handler_calls;

// Why an operation can't run on a device; success if it can.
::xla::ffi::Error CheckUsable(DeviceCommunicator& communicator, int32_t device);

// What a handler returns. After an error the rank has not made this call, but its peers may have,
// so its next one would take their data of this one. Hence no later call of the device's group
// runs: handlers refuse it; what waits on the devices of this process ends; and what is replayed on
// this device, where no handler is called, finds its region closed, and the peer buffer whose word
// `of_buffer` is.
::xla::ffi::Error Launched(DeviceCommunicator& communicator, int32_t device, cudaStream_t stream,
                           ::xla::ffi::Error error, uint32_t* of_buffer = nullptr);

XLA_FFI_Error* CudaCollectiveInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaCollective(XLA_FFI_CallFrame* frame);

// collective_matmul_cuda.cc
XLA_FFI_Error* CudaCollectiveMatmulInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaCollectiveMatmulInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaCollectiveMatmul(XLA_FFI_CallFrame* frame);

// few_rows_cuda.cc
XLA_FFI_Error* CudaFewRowsInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaFewRows(XLA_FFI_CallFrame* frame);

// experts_cuda.cc
XLA_FFI_Error* CudaLayoutInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaLayout(XLA_FFI_CallFrame* frame);

// peer_cuda.cc: the handlers behind calls on peer buffers (jax_intranode/include).
using DevicePeerBuffer = PeerBuffer<DeviceCommunicator>;
using DevicePeerBuffers = PeerBuffers<DeviceCommunicator>;

// What libraries for GPUs get.
extern const v1::Api kDevicePeerApi;

XLA_FFI_Error* CudaPeerInstantiate(XLA_FFI_CallFrame* frame);

// Ends a buffer: handlers refuse it from now on, and kernels that are replayed give up. Waits for
// what runs on its devices.
void ClosePeerBuffer(const std::string& name);

}  // namespace jax_intranode
