#include "collectives.h"

#include <utility>

#include "../kernels/same_operation.h"

namespace jax_intranode {
namespace {

bool IsBare(const DeviceOperation& o) { return PacketBytes(o.type) == BarePackets::kBytes; }

const void* Kernel(const DeviceOperation& o, int size, CallKind kind) {
  if (o.algorithm == Algorithm::kHybridCubeMesh && size != kMaxRanks) return nullptr;
  return (IsBare(o) ? BareKernel : FlaggedKernel)(o.algorithm, o.type, size, kind, o.segments > 1);
}

// Launches a kernel, which checks that all ranks run the operation that `word` tells of;
// cudaErrorInvalidDeviceFunction if there is none.
cudaError_t LaunchKernel(const void* kernel, const DeviceOperation& o, DeviceGroup group,
                         uint64_t word, const void* call, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  group.type = o.type;
  group.operation = word;
  void* arguments[] = {&group, const_cast<void*>(call)};
  const dim3 grid(o.shape.blocks + kCheckBlocks), block(o.shape.threads);
  return cudaLaunchKernel(kernel, grid, block, arguments, 0, stream);
}

// Runs the kernel for a call of a kind. `bytes`: what the ranks must agree on.
template <class Call>
cudaError_t LaunchCollective(const DeviceOperation& o, const DeviceGroup& group, CallKind kind,
                             const Call& call, size_t bytes, cudaStream_t stream) {
  const size_t packs = SegmentPacks(o.algorithm, call.Packs(), group.size, o.segments);
  const InSegments<Call> cut{call, packs, o.segments};
  return LaunchKernel(Kernel(o, group.size, kind), o, group,
                      OperationWord(o.algorithm, o.type, bytes),
                      o.segments > 1 ? static_cast<const void*>(&cut) : &call, stream);
}

// `call`: an ExpertsCall or a RoutedCall.
template <class Call>
cudaError_t LaunchExperts(const DeviceOperation& o, const DeviceGroup& group, const Call& call,
                          cudaStream_t stream) {
  return LaunchKernel(
      ExpertsKernel(o.algorithm, o.type, group.size), o, group,
      OperationWordOfDigest(o.algorithm, DigestOf(call, static_cast<uint64_t>(o.type))), &call,
      stream);
}

}  // namespace

cudaError_t Launch(const DeviceOperation& o, const DeviceGroup& group, const Buffers& call,
                   cudaStream_t stream) {
  if (call.count > 1) {
    return LaunchCollective(o, group, CallKind::kMany, call, call.Packs() * sizeof(Pack), stream);
  }
  const Buffer& buffer = call.buffer[0];
  // Ranks may differ in this, because packs travel alike.
  const size_t shards = IsTwoShot(o.algorithm) ? group.size : 1;
  if (AlignedBuffer::Is(buffer, shards * o.segments)) {
    const AlignedBuffer aligned{buffer.in, buffer.out, buffer.bytes};
    const cudaError_t status =
        LaunchCollective(o, group, CallKind::kAligned, aligned, buffer.bytes, stream);
    if (status != cudaErrorInvalidDeviceFunction) return status;
  }
  return LaunchCollective(o, group, CallKind::kAny, buffer, buffer.bytes, stream);
}

cudaError_t Launch(const DeviceOperation& o, const DeviceGroup& group, const LinkedBuffers& call,
                   cudaStream_t stream) {
  return LaunchCollective(o, group, CallKind::kMany, call, call.Packs() * sizeof(Pack), stream);
}

cudaError_t Launch(const DeviceOperation& o, const DeviceGroup& group, const Permutes& call,
                   cudaStream_t stream) {
  uint64_t digest = o.permutations * 1000003 + static_cast<uint64_t>(o.type);
  for (int m = 0; m < call.count; ++m) digest = digest * 1000003 + call.buffer[m].bytes;
  const Buffer& first = call.buffer[0];
  const bool aligned = call.count == 1 && AlignedBuffer::Is(first, 1);
  const AlignedPermute one{{first.in, first.out, first.bytes},
                           {call.source[0]},
                           {call.destination[0]},
                           call.sources,
                           call.destinations};
  return LaunchKernel((IsBare(o) ? BarePermuteKernel : FlaggedPermuteKernel)(aligned), o, group,
                      OperationWordOfDigest(o.algorithm, digest),
                      aligned ? static_cast<const void*>(&one) : &call, stream);
}

cudaError_t Launch(const DeviceOperation& o, const DeviceGroup& group, const RaggedCall& call,
                   cudaStream_t stream) {
  uint64_t digest = static_cast<uint64_t>(o.type);
  for (const uint64_t part : {uint64_t{call.in_rows}, uint64_t{call.out_rows},
                              uint64_t{call.row_bytes}, uint64_t{call.updates}}) {
    digest = digest * 1000003 + part;
  }
  if (call.kept != nullptr) {
    const cudaError_t copied =
        cudaMemcpyAsync(call.out, call.kept, call.OutBytes(), cudaMemcpyDeviceToDevice, stream);
    if (copied != cudaSuccess) return copied;
  }
  return LaunchKernel(RaggedKernel(IsBare(o), group.size == 2 && call.updates == 1), o, group,
                      OperationWordOfDigest(o.algorithm, digest), &call, stream);
}

cudaError_t Launch(const DeviceOperation& o, const DeviceGroup& group, const ExpertsCall& call,
                   cudaStream_t stream) {
  return LaunchExperts(o, group, call, stream);
}

cudaError_t Launch(const DeviceOperation& o, const DeviceGroup& group, const RoutedCall& call,
                   cudaStream_t stream) {
  return LaunchExperts(o, group, call, stream);
}

cudaError_t Launch(const DeviceOperation& o, const DeviceGroup& group, const NormCall& call,
                   cudaStream_t stream) {
  const uint64_t digest =
      static_cast<uint64_t>(o.type) | uint64_t{call.hidden} << 4 | call.rows << 19;
  return LaunchKernel(NormKernel(o.type, group.size, call.aligned), o, group,
                      OperationWordOfDigest(o.algorithm, digest), &call, stream);
}

bool NormFits(ElementType type, const NormCall& call, LaunchShape shape) {
  const size_t row_packs = PacksOf(call.hidden * ItemBytes(type));
  const size_t most_per_thread = kMaxHidden * ItemBytes(type) / sizeof(Pack) / kMaxThreads;
  const bool power_of_2 = (shape.threads & (shape.threads - 1)) == 0;
  return power_of_2 && row_packs <= shape.threads * most_per_thread;
}

}  // namespace jax_intranode
