// Launches collectives and norms on a CUDA stream. No XLA, no Python.
#pragma once

#include <cuda_runtime_api.h>

#include "../kernels/algorithms.h"
#include "../kernels/experts_call.h"
#include "../kernels/group.h"
#include "../kernels/hybrid_cube_mesh.h"
#include "../kernels/norm.h"
#include "../kernels/permute.h"
#include "../kernels/ragged_call.h"
#include "../kernels/segments.h"
#include "failure.h"

namespace jax_intranode {

// A group as its kernels get it, by value.
struct DeviceGroup : Group {
  FailureRecord* failure;  // mapped host memory
  uint64_t timeout_ns;     // the deadline of a wait
  uint32_t site;           // number of the call site, for the failure record
  ElementType type;        // of a collective
  // What the ranks of the group must agree on (kernels/same_operation.h). 0 in a collective matmul:
  // no check, for a probe whose ranks don't all exist.
  uint64_t operation;
};

// Every driver takes kernel parameters of this size.
static_assert(sizeof(DeviceGroup) + sizeof(InSegments<Buffers>) <= 4096);
static_assert(sizeof(DeviceGroup) + sizeof(LinkedBuffers) <= 4096);
static_assert(sizeof(DeviceGroup) + sizeof(Permutes) <= 4096);

// The buffers that a kernel takes: AlignedBuffer, Buffer, or Buffers (that of a hybrid cube mesh:
// LinkedBuffers).
enum class CallKind { kAligned, kAny, kMany };

// The kernel of an element type in a group of `size` ranks; null if there is none. `in_segments`:
// it takes the buffers as InSegments (segments.h). kernels_bare.cu and kernels_flagged.cu define
// the first two, for the types of such packets.
const void* BareKernel(Algorithm algorithm, ElementType type, int size, CallKind kind,
                       bool in_segments);
const void* FlaggedKernel(Algorithm algorithm, ElementType type, int size, CallKind kind,
                          bool in_segments);
const void* BarePermuteKernel(bool aligned);
const void* FlaggedPermuteKernel(bool aligned);
const void* RaggedKernel(bool bare, bool one_of_two);                        // ragged.cu
const void* ExpertsKernel(Algorithm algorithm, ElementType type, int size);  // experts.cu
const void* NormKernel(ElementType type, int size, bool aligned);

struct LaunchShape {
  int blocks;
  int threads;
};

// What is launched. More than one segment is for algorithms that RunsInSegments().
struct DeviceOperation {
  Algorithm algorithm;
  ElementType type;
  uint32_t segments;
  LaunchShape shape;
  uint64_t permutations = 0;  // a hash of those of all members of a permute
};

// Enqueues one operation: a kernel launch without allocation or synchronisation. May be captured.
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup& group, const Buffers& call,
                   cudaStream_t stream);
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup& group,
                   const LinkedBuffers& call, cudaStream_t stream);
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup& group, const Permutes& call,
                   cudaStream_t stream);
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup& group, const NormCall& call,
                   cudaStream_t stream);
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup& group,
                   const RaggedCall& call, cudaStream_t stream);
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup& group,
                   const ExpertsCall& call, cudaStream_t stream);
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup& group,
                   const RoutedCall& call, cudaStream_t stream);

// Whether blocks of this shape can work on rows of this length.
bool NormFits(ElementType type, const NormCall& call, LaunchShape shape);

}  // namespace jax_intranode
