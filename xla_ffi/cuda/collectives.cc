#include "collectives.h"

#include <utility>

#include "../kernels/same_operation.h"

namespace jax_intranode {
namespace {

const void* Kernel(Algorithm algorithm, ElementType type, int size, CallKind kind,
                   bool in_segments) {
  if (algorithm == Algorithm::kHybridCubeMesh && size != kMaxRanks) return nullptr;
  return PacketBytes(type) == BarePackets::kBytes
             ? BareKernel(algorithm, type, size, kind, in_segments)
             : FlaggedKernel(algorithm, type, size, kind, in_segments);
}

// Launches a kernel, which checks that all ranks run `operation`; cudaErrorInvalidDeviceFunction if
// there is none.
cudaError_t LaunchKernel(const void* kernel, DeviceGroup group, uint64_t operation,
                         const void* call, LaunchShape shape, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  group.operation = operation;
  void* arguments[] = {&group, const_cast<void*>(call)};
  const dim3 grid(shape.blocks + kCheckBlocks), block(shape.threads);
  return cudaLaunchKernel(kernel, grid, block, arguments, 0, stream);
}

// Runs the kernel for a call of a kind. `bytes`: what the ranks must agree on.
template <class Call>
cudaError_t LaunchCollective(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                             CallKind kind, const Call& call, size_t bytes, uint32_t segments,
                             LaunchShape shape, cudaStream_t stream) {
  const size_t packs = SegmentPacks(algorithm, call.Packs(), group.size, segments);
  const InSegments<Call> cut{call, packs, segments};
  DeviceGroup typed = group;
  typed.type = type;
  return LaunchKernel(Kernel(algorithm, type, group.size, kind, segments > 1), typed,
                      OperationWord(algorithm, type, bytes),
                      segments > 1 ? static_cast<const void*>(&cut) : &call, shape, stream);
}

}  // namespace

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                   const Buffer& buffer, uint32_t segments, LaunchShape shape,
                   cudaStream_t stream) {
  if (algorithm == Algorithm::kHybridCubeMesh) {  // its kernels take many buffers
    Buffers buffers;
    buffers.Append(buffer);
    return Launch(algorithm, type, group, buffers, segments, shape, stream);
  }
  // Ranks may differ in this, because packs travel alike.
  const size_t shards = IsTwoShot(algorithm) ? group.size : 1;
  if (AlignedBuffer::Is(buffer, shards * segments)) {
    const AlignedBuffer aligned{buffer.in, buffer.out, buffer.bytes};
    const cudaError_t status = LaunchCollective(algorithm, type, group, CallKind::kAligned, aligned,
                                                buffer.bytes, segments, shape, stream);
    if (status != cudaErrorInvalidDeviceFunction) return status;
  }
  return LaunchCollective(algorithm, type, group, CallKind::kAny, buffer, buffer.bytes, segments,
                          shape, stream);
}

cudaError_t Launch(Algorithm algorithm, ElementType type, const DeviceGroup& group,
                   const Buffers& buffers, uint32_t segments, LaunchShape shape,
                   cudaStream_t stream) {
  return LaunchCollective(algorithm, type, group, CallKind::kMany, buffers,
                          buffers.Packs() * sizeof(Pack), segments, shape, stream);
}

cudaError_t LaunchPermute(ElementType type, const DeviceGroup& group, const Permutes& call,
                          uint64_t permutations, LaunchShape shape, cudaStream_t stream) {
  const bool bare = PacketBytes(type) == BarePackets::kBytes;
  uint64_t digest = permutations * 1000003 + static_cast<uint64_t>(type);
  for (int m = 0; m < call.count; ++m) digest = digest * 1000003 + call.buffer[m].bytes;
  const Buffer& first = call.buffer[0];
  const bool aligned = call.count == 1 && AlignedBuffer::Is(first, 1);
  const AlignedPermute one{{first.in, first.out, first.bytes},
                           {call.source[0]},
                           {call.destination[0]},
                           call.sources,
                           call.destinations};
  DeviceGroup typed = group;
  typed.type = type;
  return LaunchKernel(bare ? BarePermuteKernel(aligned) : FlaggedPermuteKernel(aligned), typed,
                      OperationWordOfDigest(Algorithm::kPermute, digest),
                      aligned ? static_cast<const void*>(&one) : &call, shape, stream);
}

cudaError_t LaunchNorm(ElementType type, const DeviceGroup& group, const NormCall& call,
                       LaunchShape shape, cudaStream_t stream) {
  const uint64_t digest =
      static_cast<uint64_t>(type) | uint64_t{call.hidden} << 4 | call.rows << 19;
  return LaunchKernel(NormKernel(type, group.size, call.aligned), group,
                      OperationWordOfDigest(call.algorithm, digest), &call, shape, stream);
}

bool NormFits(ElementType type, const NormCall& call, LaunchShape shape) {
  const size_t row_packs = PacksOf(call.hidden * ItemBytes(type));
  const size_t most_per_thread = kMaxHidden * ItemBytes(type) / sizeof(Pack) / kMaxThreads;
  const bool power_of_2 = (shape.threads & (shape.threads - 1)) == 0;
  return power_of_2 && row_packs <= shape.threads * most_per_thread;
}

}  // namespace jax_intranode
