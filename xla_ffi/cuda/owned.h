// Streams, events, graphs and memory of CUDA's runtime that are destroyed with their owner.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "slab.h"

namespace jax_intranode {

struct CudaDeleter {
  void operator()(void* memory) const { cudaFree(memory); }
  void operator()(CUstream_st* stream) const { cudaStreamDestroy(stream); }
  void operator()(CUgraph_st* graph) const { cudaGraphDestroy(graph); }
  void operator()(CUgraphExec_st* program) const { cudaGraphExecDestroy(program); }
  void operator()(CUevent_st* event) const { cudaEventDestroy(event); }
};
template <class T>
using Owned = std::unique_ptr<T, CudaDeleter>;

// A stream that doesn't wait for XLA's work.
inline Owned<CUstream_st> NewStream() {
  cudaStream_t stream;
  ThrowIfError(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  return Owned<CUstream_st>(stream);
}

inline Owned<CUevent_st> NewEvent() {
  cudaEvent_t event;
  ThrowIfError(cudaEventCreate(&event), "creating an event");
  return Owned<CUevent_st>(event);
}

}  // namespace jax_intranode
