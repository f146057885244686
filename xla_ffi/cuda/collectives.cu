// The kernels of one element type, JIN_TYPE. This file is compiled once for each type, so that a
// build uses all cores.
#include <type_traits>

#include "../kernels/all_gather.h"
#include "../kernels/all_to_all.h"
#include "../kernels/hybrid_cube_mesh.h"
#include "../kernels/one_shot.h"
#include "../kernels/reduce_scatter.h"
#include "../kernels/segments.h"
#include "../kernels/two_shot.h"
#include "collective_kernels.h"
#include "device_thread.h"

namespace jax_intranode {
namespace {

// One kernel for each algorithm of xla_ffi/kernels. Profilers show its name.
template <template <class, int, class> class Body, Algorithm algorithm, class Type, int N,
          class Call>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_kernel(const __grid_constant__ DeviceGroup group,
                         const __grid_constant__ Call call) {
  DeviceThread thread(group, algorithm);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group);
    return;
  }
  Body<Type, N, typename Type::Packets>::Run(thread, group, call);
}

template <template <class, int, class> class Body, Algorithm algorithm, class Type, int N,
          class Call>
const void* Address() {
  return reinterpret_cast<const void*>(&jax_intranode_kernel<Body, algorithm, Type, N, Call>);
}

// Copies don't depend on the type: BF16 and I8 stand for all types (CopiedAs).
template <class Type>
constexpr bool kStandsForCopies = std::is_same_v<Type, BF16> || std::is_same_v<Type, I8>;

template <class Type, int N, class Call>
const void* Kernel(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kOneShot:
      return Address<OneShot, Algorithm::kOneShot, Type, N, Call>();
    case Algorithm::kTwoShot:
      return Address<TwoShot, Algorithm::kTwoShot, Type, N, Call>();
    case Algorithm::kReduceScatter:
      if constexpr (!std::is_same_v<Call, Buffers>) {
        return Address<ReduceScatter, Algorithm::kReduceScatter, Type, N, Call>();
      }
      break;
    case Algorithm::kAllGather:
      if constexpr (!std::is_same_v<Call, Buffers> && kStandsForCopies<Type>) {
        return Address<AllGather, Algorithm::kAllGather, Type, N, Call>();
      }
      break;
    case Algorithm::kAllToAll:
      if constexpr (!std::is_same_v<Call, Buffers> && kStandsForCopies<Type>) {
        return Address<AllToAll, Algorithm::kAllToAll, Type, N, Call>();
      }
      break;
    case Algorithm::kHybridCubeMesh:
      // One kernel for each type: a call of one buffer takes it, too.
      if constexpr (std::is_same_v<Call, Buffers>) {
        return Address<HybridCubeMesh, Algorithm::kHybridCubeMesh, Type, kMaxRanks, Call>();
      }
      break;
    default:
      break;  // pipelined_matmul.h, norms.h
  }
  return nullptr;
}

// Kernels of their own, so that operations of one epoch have no loop around them.
template <class Type, int N, class Call>
const void* KernelInSegments(Algorithm algorithm) {
  using Cut = InSegments<Call>;
  if constexpr (N == 0 || N == 2) {  // among more ranks two-shot sends less
    if (algorithm == Algorithm::kOneShot) {
      return Address<OneShot, Algorithm::kOneShot, Type, N, Cut>();
    }
  }
  if (algorithm == Algorithm::kTwoShot) {
    return Address<TwoShot, Algorithm::kTwoShot, Type, N, Cut>();
  }
  if constexpr (!std::is_same_v<Call, Buffers>) {
    if (algorithm == Algorithm::kReduceScatter) {
      return Address<ReduceScatter, Algorithm::kReduceScatter, Type, N, Cut>();
    }
    if constexpr (kStandsForCopies<Type>) {
      if (algorithm == Algorithm::kAllGather) {
        return Address<AllGather, Algorithm::kAllGather, Type, N, Cut>();
      }
      if (algorithm == Algorithm::kAllToAll) {
        return Address<AllToAll, Algorithm::kAllToAll, Type, N, Cut>();
      }
    }
  }
  return nullptr;
}

template <class Type>
const void* KernelInSegments(Algorithm algorithm, int size, CallKind kind) {
  switch (kind) {
    case CallKind::kAligned:
      if constexpr (std::is_same_v<typename Type::Packets, BarePackets>) {
        if (size == 2) return KernelInSegments<Type, 2, AlignedBuffer>(algorithm);
        if (size == 4) return KernelInSegments<Type, 4, AlignedBuffer>(algorithm);
        if (size == 8) return KernelInSegments<Type, 8, AlignedBuffer>(algorithm);
      }
      return nullptr;
    case CallKind::kAny:
      return KernelInSegments<Type, 0, Buffer>(algorithm);
    case CallKind::kMany:  // for instance gradients, which are large together
      if constexpr (std::is_same_v<typename Type::Packets, BarePackets>) {
        if (size == 2) return KernelInSegments<Type, 2, Buffers>(algorithm);
        if (size == 4 && algorithm != Algorithm::kOneShot) {
          return KernelInSegments<Type, 4, Buffers>(algorithm);
        }
      }
      return KernelInSegments<Type, 0, Buffers>(algorithm);
  }
  return nullptr;
}

}  // namespace

// World sizes 2, 4 and 8 have kernels of their own for aligned buffers, and for the types that
// models compute in. Other cases share one kernel, because each kernel costs build time. In
// segments only aligned buffers of the latter have kernels of their own.
template <>
const void* CollectiveKernel<ElementType::JIN_ELEMENT_TYPE>(Algorithm algorithm, int size,
                                                            CallKind kind, bool in_segments) {
  using Type = JIN_TYPE;
  if (in_segments) return KernelInSegments<Type>(algorithm, size, kind);
  switch (kind) {
    case CallKind::kAligned:
      if (size == 2) return Kernel<Type, 2, AlignedBuffer>(algorithm);
      if (size == 4) return Kernel<Type, 4, AlignedBuffer>(algorithm);
      if (size == 8) return Kernel<Type, 8, AlignedBuffer>(algorithm);
      return nullptr;
    case CallKind::kAny:
      if constexpr (std::is_same_v<Type::Packets, BarePackets>) {
        if (size == 2) return Kernel<Type, 2, Buffer>(algorithm);
        if (size == 4) return Kernel<Type, 4, Buffer>(algorithm);
        if (size == 8) return Kernel<Type, 8, Buffer>(algorithm);
      }
      return Kernel<Type, 0, Buffer>(algorithm);
    case CallKind::kMany:
      return Kernel<Type, 0, Buffers>(algorithm);
  }
  return nullptr;
}

}  // namespace jax_intranode
