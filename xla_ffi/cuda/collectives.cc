#include "collectives.h"

#include "../kernels/same_operation.h"
#include "collective_kernels.h"

namespace jax_intranode {
namespace {

const void* Kernel(Algorithm algorithm, ElementType type, int size, CallKind kind) {
  switch (algorithm == Algorithm::kAllGather ? CopiedAs(type) : type) {
#define JIN_X(type, item_bytes, packet_bytes) \
  case ElementType::k##type:                  \
    return CollectiveKernel<ElementType::k##type>(algorithm, size, kind);
    JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X
  }
  return nullptr;
}

cudaError_t LaunchKernel(const void* kernel, const DeviceGroup& group, const void* call,
                         LaunchShape shape, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  void* arguments[] = {const_cast<DeviceGroup*>(&group), const_cast<void*>(call)};
  const dim3 grid(shape.blocks + kCheckBlocks), block(shape.threads);
  return cudaLaunchKernel(kernel, grid, block, arguments, 0, stream);
}

DeviceGroup Named(DeviceGroup group, Algorithm algorithm, ElementType type, size_t bytes) {
  group.operation = OperationWord(algorithm, type, bytes);
  return group;
}

}  // namespace

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& unnamed,
                   const Buffer& buffer, LaunchShape shape, cudaStream_t stream) {
  const DeviceGroup group = Named(unnamed, algorithm, type, buffer.bytes);
  // Ranks may differ in this, because packs travel alike.
  if (AlignedBuffer::Is(buffer, algorithm == Algorithm::kTwoShot ? group.size : 1)) {
    if (const void* kernel = Kernel(algorithm, type, group.size, CallKind::kAligned)) {
      const AlignedBuffer aligned{buffer.in, buffer.out, buffer.bytes};
      return LaunchKernel(kernel, group, &aligned, shape, stream);
    }
  }
  const void* kernel = Kernel(algorithm, type, group.size, CallKind::kAny);
  return LaunchKernel(kernel, group, &buffer, shape, stream);
}

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& unnamed,
                   const Buffers& buffers, LaunchShape shape, cudaStream_t stream) {
  const DeviceGroup group = Named(unnamed, algorithm, type, buffers.Packs() * sizeof(Pack));
  const void* kernel = Kernel(algorithm, type, group.size, CallKind::kMany);
  return LaunchKernel(kernel, group, &buffers, shape, stream);
}

cudaError_t LoadKernels() {
  for (Algorithm algorithm : kAlgorithms) {
    for (ElementType type : kElementTypes) {
      for (int size : {2, 3, 4, 8}) {
        for (CallKind kind : {CallKind::kAligned, CallKind::kAny, CallKind::kMany}) {
          const void* kernel = Kernel(algorithm, type, size, kind);
          if (kernel == nullptr) continue;
          cudaFuncAttributes attributes;
          const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace jax_intranode
