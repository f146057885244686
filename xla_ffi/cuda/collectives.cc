#include "collectives.h"

#include "collective_kernels.h"

namespace jax_intranode {
namespace {

const void* Kernel(Algorithm algorithm, ElementType type, int size, CallKind kind) {
  switch (algorithm == Algorithm::kAllGather ? CopiedAs(type) : type) {
    case ElementType::kF32:
      return CollectiveKernel<ElementType::kF32>(algorithm, size, kind);
    case ElementType::kBF16:
      return CollectiveKernel<ElementType::kBF16>(algorithm, size, kind);
    case ElementType::kF16:
      return CollectiveKernel<ElementType::kF16>(algorithm, size, kind);
    case ElementType::kF64:
      return CollectiveKernel<ElementType::kF64>(algorithm, size, kind);
    case ElementType::kI8:
      return CollectiveKernel<ElementType::kI8>(algorithm, size, kind);
    case ElementType::kI32:
      return CollectiveKernel<ElementType::kI32>(algorithm, size, kind);
    case ElementType::kI64:
      return CollectiveKernel<ElementType::kI64>(algorithm, size, kind);
  }
  return nullptr;
}

cudaError_t LaunchKernel(const void* kernel, const DeviceGroup& group, const void* call,
                         LaunchShape shape, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  void* arguments[] = {const_cast<DeviceGroup*>(&group), const_cast<void*>(call)};
  return cudaLaunchKernel(kernel, dim3(shape.blocks), dim3(shape.threads), arguments, 0, stream);
}

}  // namespace

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                   const Buffer& buffer, LaunchShape shape, cudaStream_t stream) {
  // Ranks may differ in this: how packs travel is the same.
  if (AlignedBuffer::Is(buffer, algorithm == Algorithm::kTwoShot ? group.size : 1)) {
    if (const void* kernel = Kernel(algorithm, type, group.size, CallKind::kAligned)) {
      const AlignedBuffer aligned{buffer.in, buffer.out, buffer.bytes};
      return LaunchKernel(kernel, group, &aligned, shape, stream);
    }
  }
  const void* kernel = Kernel(algorithm, type, group.size, CallKind::kAny);
  return LaunchKernel(kernel, group, &buffer, shape, stream);
}

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                   const Buffers& buffers, LaunchShape shape, cudaStream_t stream) {
  const void* kernel = Kernel(algorithm, type, group.size, CallKind::kMany);
  return LaunchKernel(kernel, group, &buffers, shape, stream);
}

cudaError_t LoadKernels() {
  for (Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kReduceScatter,
                              Algorithm::kAllGather}) {
    for (ElementType type :
         {ElementType::kF32, ElementType::kBF16, ElementType::kF16, ElementType::kF64,
          ElementType::kI8, ElementType::kI32, ElementType::kI64}) {
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
