#include "collectives.h"

#include "../kernels/same_operation.h"
#include "collective_kernels.h"

namespace jax_intranode {
namespace {

const void* Kernel(Algorithm algorithm, ElementType type, int size, CallKind kind,
                   bool in_segments) {
  if (algorithm == Algorithm::kHybridCubeMesh && size != kMaxRanks) return nullptr;
  switch (OnlyCopies(algorithm) ? CopiedAs(type) : type) {
#define JIN_X(type, item_bytes, packet_bytes) \
  case ElementType::k##type:                  \
    return CollectiveKernel<ElementType::k##type>(algorithm, size, kind, in_segments);
    JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X
  }
  return nullptr;
}

// Runs the kernel for a call of a kind; cudaErrorInvalidDeviceFunction if there is none.
template <class Call>
cudaError_t LaunchKernel(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                         CallKind kind, const Call& call, uint32_t segments, LaunchShape shape,
                         cudaStream_t stream) {
  const void* kernel = Kernel(algorithm, type, group.size, kind, segments > 1);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  const size_t packs = SegmentPacks(algorithm, call.Packs(), group.size, segments);
  const InSegments<Call> cut{call, packs, segments};
  const void* taken = segments > 1 ? static_cast<const void*>(&cut) : &call;
  void* arguments[] = {const_cast<DeviceGroup*>(&group), const_cast<void*>(taken)};
  const dim3 grid(shape.blocks + kCheckBlocks), block(shape.threads);
  return cudaLaunchKernel(kernel, grid, block, arguments, 0, stream);
}

DeviceGroup Named(DeviceGroup group, Algorithm algorithm, ElementType type, size_t bytes) {
  group.operation = OperationWord(algorithm, type, bytes);
  return group;
}

}  // namespace

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& unnamed,
                   const Buffer& buffer, uint32_t segments, LaunchShape shape,
                   cudaStream_t stream) {
  if (algorithm == Algorithm::kHybridCubeMesh) {  // its kernels take many buffers
    Buffers buffers;
    buffers.Append(buffer);
    return Launch(algorithm, type, unnamed, buffers, segments, shape, stream);
  }
  const DeviceGroup group = Named(unnamed, algorithm, type, buffer.bytes);
  // Ranks may differ in this, because packs travel alike.
  const size_t shards = algorithm == Algorithm::kTwoShot ? group.size : 1;
  if (AlignedBuffer::Is(buffer, shards * segments)) {
    const AlignedBuffer aligned{buffer.in, buffer.out, buffer.bytes};
    const cudaError_t status =
        LaunchKernel(algorithm, type, group, CallKind::kAligned, aligned, segments, shape, stream);
    if (status != cudaErrorInvalidDeviceFunction) return status;
  }
  return LaunchKernel(algorithm, type, group, CallKind::kAny, buffer, segments, shape, stream);
}

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& unnamed,
                   const Buffers& buffers, uint32_t segments, LaunchShape shape,
                   cudaStream_t stream) {
  const DeviceGroup group = Named(unnamed, algorithm, type, buffers.Packs() * sizeof(Pack));
  return LaunchKernel(algorithm, type, group, CallKind::kMany, buffers, segments, shape, stream);
}

cudaError_t LoadKernels() {
  for (Algorithm algorithm : kAlgorithms) {
    for (ElementType type : kElementTypes) {
      for (int size : {2, 3, 4, 8}) {
        for (CallKind kind : {CallKind::kAligned, CallKind::kAny, CallKind::kMany}) {
          for (bool in_segments : {false, true}) {
            const void* kernel = Kernel(algorithm, type, size, kind, in_segments);
            if (kernel == nullptr) continue;
            cudaFuncAttributes attributes;
            const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace jax_intranode
