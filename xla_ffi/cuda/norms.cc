#include "norms.h"

#include <utility>

#include "../kernels/same_operation.h"

namespace jax_intranode {
namespace {

constexpr ElementType kTypes[] = {ElementType::kF32, ElementType::kBF16, ElementType::kF16};

const void* Kernel(ElementType type, int size, bool aligned) {
  switch (type) {
    case ElementType::kF32:
      return NormKernel<ElementType::kF32>(size, aligned);
    case ElementType::kBF16:
      return NormKernel<ElementType::kBF16>(size, aligned);
    case ElementType::kF16:
      return NormKernel<ElementType::kF16>(size, aligned);
    default:
      return nullptr;
  }
}

}  // namespace

cudaError_t LaunchNorm(ElementType type, const DeviceGroup& unnamed, const NormCall& call,
                       LaunchShape shape, cudaStream_t stream) {
  DeviceGroup group = unnamed;
  group.operation = OperationWordOfDigest(
      call.algorithm, static_cast<uint64_t>(type) | uint64_t{call.hidden} << 4 | call.rows << 19);
  const void* kernel = Kernel(type, group.size, call.aligned);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  void* arguments[] = {const_cast<DeviceGroup*>(&group), const_cast<NormCall*>(&call)};
  const dim3 grid(shape.blocks + kCheckBlocks), block(shape.threads);
  return cudaLaunchKernel(kernel, grid, block, arguments, 0, stream);
}

bool NormFits(ElementType type, const NormCall& call, LaunchShape shape) {
  const size_t row_packs = PacksOf(call.hidden * ItemBytes(type));
  const size_t most_per_thread = kMaxHidden * ItemBytes(type) / sizeof(Pack) / kMaxNormThreads;
  const bool power_of_2 = (shape.threads & (shape.threads - 1)) == 0;
  return power_of_2 && row_packs <= shape.threads * most_per_thread;
}

cudaError_t LoadNormKernels() {
  for (ElementType type : kTypes) {
    for (const auto& [size, aligned] :
         {std::pair(2, true), std::pair(3, true), std::pair(2, false)}) {
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(&attributes, Kernel(type, size, aligned));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_intranode
