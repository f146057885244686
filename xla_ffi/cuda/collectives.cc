#include "collectives.h"

#include "collective_kernels.h"

namespace jax_intranode {
namespace {

const void* Kernel(Algorithm algorithm, ElementType type, int size, bool many) {
  switch (algorithm == Algorithm::kAllGather ? CopiedAs(type) : type) {
    case ElementType::kF32:
      return CollectiveKernel<ElementType::kF32>(algorithm, size, many);
    case ElementType::kBF16:
      return CollectiveKernel<ElementType::kBF16>(algorithm, size, many);
    case ElementType::kF16:
      return CollectiveKernel<ElementType::kF16>(algorithm, size, many);
    case ElementType::kF64:
      return CollectiveKernel<ElementType::kF64>(algorithm, size, many);
    case ElementType::kI8:
      return CollectiveKernel<ElementType::kI8>(algorithm, size, many);
    case ElementType::kI32:
      return CollectiveKernel<ElementType::kI32>(algorithm, size, many);
    case ElementType::kI64:
      return CollectiveKernel<ElementType::kI64>(algorithm, size, many);
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
  return LaunchKernel(Kernel(algorithm, type, group.size, false), group, &buffer, shape, stream);
}

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                   const Buffers& buffers, LaunchShape shape, cudaStream_t stream) {
  return LaunchKernel(Kernel(algorithm, type, group.size, true), group, &buffers, shape, stream);
}

cudaError_t LoadKernels() {
  for (Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kReduceScatter,
                              Algorithm::kAllGather}) {
    for (ElementType type :
         {ElementType::kF32, ElementType::kBF16, ElementType::kF16, ElementType::kF64,
          ElementType::kI8, ElementType::kI32, ElementType::kI64}) {
      for (int size : {2, 3, 4, 8}) {
        for (bool many : {false, true}) {
          const void* kernel = Kernel(algorithm, type, size, many);
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
