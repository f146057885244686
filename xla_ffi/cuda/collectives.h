// Launches collectives on a CUDA stream. No XLA, no Python.
#pragma once

#include <cuda_runtime_api.h>

#include "../kernels/algorithms.h"
#include "../kernels/group.h"
#include "failure.h"

namespace jax_intranode {

// What a kernel needs to know of its communicator; passed by value.
struct DeviceGroup : Group {
  FailureRecord* failure;  // mapped host memory
  uint64_t timeout_ns;     // of a wait in which nothing arrives
};

// Kernel parameters of this size hold with every driver.
static_assert(sizeof(DeviceGroup) + sizeof(Buffers) <= 4096);

// The most threads a block may have; the number of registers of the kernels follows from it.
constexpr int kMaxThreads = 512;

struct LaunchShape {
  int blocks;
  int threads;
};

// Enqueues one operation. Only a launch: no allocation, no synchronisation; may be captured.
cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                   const Buffer& buffer, LaunchShape shape, cudaStream_t stream);
cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                   const Buffers& buffers, LaunchShape shape, cudaStream_t stream);

// Loads every kernel onto the current device. Loading may wait for what runs on the GPU, so it must
// not happen for the first time while a peer's kernel waits for ours.
cudaError_t LoadKernels();

}  // namespace jax_intranode
