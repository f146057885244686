#include "all_reduce.h"

#include "all_reduce_kernels.h"

namespace jax_intranode {
namespace {

const void* Kernel(Algorithm algorithm, ElementType type, int size, bool many) {
  switch (type) {
    case ElementType::kF32:
      return AllReduceKernel<ElementType::kF32>(algorithm, size, many);
    case ElementType::kBF16:
      return AllReduceKernel<ElementType::kBF16>(algorithm, size, many);
    case ElementType::kF16:
      return AllReduceKernel<ElementType::kF16>(algorithm, size, many);
    case ElementType::kF64:
      return AllReduceKernel<ElementType::kF64>(algorithm, size, many);
    case ElementType::kI8:
      return AllReduceKernel<ElementType::kI8>(algorithm, size, many);
    case ElementType::kI32:
      return AllReduceKernel<ElementType::kI32>(algorithm, size, many);
    case ElementType::kI64:
      return AllReduceKernel<ElementType::kI64>(algorithm, size, many);
  }
  return nullptr;
}

cudaError_t Launch(const void* kernel, const DeviceGroup& group, const void* call,
                   LaunchShape shape, cudaStream_t stream) {
  void* arguments[] = {const_cast<DeviceGroup*>(&group), const_cast<void*>(call)};
  return cudaLaunchKernel(kernel, dim3(shape.blocks), dim3(shape.threads), arguments, 0, stream);
}

}  // namespace

cudaError_t LaunchAllReduce(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                            const Buffer& buffer, LaunchShape shape, cudaStream_t stream) {
  return Launch(Kernel(algorithm, type, group.size, false), group, &buffer, shape, stream);
}

cudaError_t LaunchAllReduce(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                            const Buffers& buffers, LaunchShape shape, cudaStream_t stream) {
  return Launch(Kernel(algorithm, type, group.size, true), group, &buffers, shape, stream);
}

cudaError_t LoadAllReduceKernels() {
  for (Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot}) {
    for (ElementType type :
         {ElementType::kF32, ElementType::kBF16, ElementType::kF16, ElementType::kF64,
          ElementType::kI8, ElementType::kI32, ElementType::kI64}) {
      for (int size : {2, 3, 4, 8}) {
        for (bool many : {false, true}) {
          cudaFuncAttributes attributes;
          const cudaError_t error =
              cudaFuncGetAttributes(&attributes, Kernel(algorithm, type, size, many));
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace jax_intranode
