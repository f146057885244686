// The kernels of collectives. kernels_*.cu compile them for the types of each kind of packets.
#pragma once

#include <type_traits>

#include "../kernels/hybrid_cube_mesh.h"
#include "../kernels/one_hop.h"
#include "../kernels/permute.h"
#include "../kernels/segments.h"
#include "../kernels/two_shot.h"
#include "device_thread.h"
#include "launch.h"

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
  RunOperation<Body<Type, N, typename Type::Packets>>(thread, group, call);
}

template <class Type, class Call>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_permute(const __grid_constant__ DeviceGroup group,
                          const __grid_constant__ Call call) {
  DeviceThread thread(group, Algorithm::kPermute);
  if (thread.IsCheckBlock()) {
    BeginPermute(thread, group, call);
    return;
  }
  RunOperation<Permute<Type, 0, typename Type::Packets>>(thread, group, call);
}

template <class Type, int N>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_cube_mesh(const __grid_constant__ DeviceGroup group,
                            const __grid_constant__ LinkedBuffers call) {
  DeviceThread thread(group, Algorithm::kHybridCubeMesh);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group, call.links.peers);
    return;
  }
  RunOperation<HybridCubeMesh<Type, N>>(thread, group, call);
}

template <class Type>
const void* PermuteKernel(bool aligned) {
  using Copied = CopiedAs<Type>;
  return aligned ? kListed<&jax_intranode_permute<Copied, AlignedPermute>>
                 : kListed<&jax_intranode_permute<Copied, Permutes>>;
}

template <template <class, int, class> class Body, Algorithm algorithm, class Type, int N,
          class Call>
const void* Address() {
  return kListed<&jax_intranode_kernel<Body, algorithm, Type, N, Call>>;
}

// Calls in segments have kernels of their own, so that operations of one epoch have no loop around
// them.
template <class Call>
constexpr bool kInSegments = false;
template <class Call>
constexpr bool kInSegments<InSegments<Call>> = true;

// Maxima and minima have fewer kernels, which all learn the type when they run: one for any world
// size, and one for each of the others for aligned buffers of bare packets.
template <template <class, int, class> class Body, Algorithm algorithm, class Type, bool kMax,
          int N, class Call>
const void* ExtremeKernel() {
  constexpr bool kAligned =
      std::is_same_v<Call, AlignedBuffer> || std::is_same_v<Call, InSegments<AlignedBuffer>>;
  constexpr bool kOwn = std::is_same_v<Type, AnyBare> && kAligned;
  if constexpr (kThreadTellsType<Type> && (N == 0 ? !kAligned : kOwn)) {
    return Address<Body, algorithm, Extreme<Type, kMax>, N, Call>();
  }
  return nullptr;
}

template <class Type, int N, class Call>
const void* Kernel(Algorithm algorithm) {
  constexpr bool kCut = kInSegments<Call>;
  constexpr bool kMany = std::is_same_v<Call, Buffers> || std::is_same_v<Call, InSegments<Buffers>>;
  switch (algorithm) {
    case Algorithm::kOneShot:
      if constexpr (!kCut || N == 0 || N == 2) {  // among more ranks two-shot sends less
        return Address<OneShot, Algorithm::kOneShot, Type, N, Call>();
      }
      break;
    case Algorithm::kTwoShot:
      return Address<TwoShot, Algorithm::kTwoShot, Type, N, Call>();
    case Algorithm::kReduceScatter:
      if constexpr (!kMany) {
        return Address<ReduceScatter, Algorithm::kReduceScatter, Type, N, Call>();
      }
      break;
    case Algorithm::kAllGather:
      if constexpr (!kMany) {
        return Address<AllGather, Algorithm::kAllGather, CopiedAs<Type>, N, Call>();
      }
      break;
    case Algorithm::kAllToAll:
      if constexpr (!kMany) {
        return Address<AllToAll, Algorithm::kAllToAll, CopiedAs<Type>, N, Call>();
      }
      break;
    case Algorithm::kOneShotMax:
      return ExtremeKernel<OneShot, Algorithm::kOneShotMax, Type, true, N, Call>();
    case Algorithm::kTwoShotMax:
      return ExtremeKernel<TwoShot, Algorithm::kTwoShotMax, Type, true, N, Call>();
    case Algorithm::kOneShotMin:
      return ExtremeKernel<OneShot, Algorithm::kOneShotMin, Type, false, N, Call>();
    case Algorithm::kTwoShotMin:
      return ExtremeKernel<TwoShot, Algorithm::kTwoShotMin, Type, false, N, Call>();
    default:
      break;  // KernelOfCall, pipelined_matmul.h, norms.cu
  }
  return nullptr;
}

// The kernel of the world size, if it is one of `kSizes`.
template <class Type, class Call, int... kSizes>
const void* KernelOfSize(Algorithm algorithm, int size) {
  const void* kernel = nullptr;
  ((kernel = size == kSizes ? Kernel<Type, kSizes, Call>(algorithm) : kernel), ...);
  return kernel;
}
// The same, or else the kernel of all world sizes.
template <class Type, class Call, int... kSizes>
const void* KernelOfAnySize(Algorithm algorithm, int size) {
  const void* const kernel = KernelOfSize<Type, Call, kSizes...>(algorithm, size);
  return kernel != nullptr ? kernel : Kernel<Type, 0, Call>(algorithm);
}

// World sizes 2, 4 and 8 have kernels of their own for aligned buffers, and for the types that
// models compute in. Other cases share one kernel, because each kernel costs build time. In
// segments only aligned buffers of the latter have kernels of their own, and many buffers, for
// instance gradients, which are large together.
template <class Type>
const void* KernelOfCall(Algorithm algorithm, ElementType type, int size, CallKind kind,
                         bool in_segments) {
  constexpr bool kBare = std::is_same_v<Type, AnyBare>;
  if (algorithm == Algorithm::kHybridCubeMesh) {
    // One kernel for each type: a call of one buffer takes it, too.
    if (kind != CallKind::kMany || in_segments) return nullptr;
    return Type::Visit(
        type, [](auto of) { return kListed<&jax_intranode_cube_mesh<decltype(of), kMaxRanks>>; });
  }
  switch (kind) {
    case CallKind::kAligned:
      if constexpr (kBare) {
        // Between two H100 a sum of 1, 64 or 512 KB takes 0.04 to 0.08 us longer, of 2.2 to 4.1, if
        // its kernel learns the type when it runs (docs/measurements/experiments.md).
        if (!in_segments && !OnlyCopies(algorithm) && ReductionOf(algorithm) == Reduction::kSum) {
          return Type::Visit(type, [&](auto of) {
            return KernelOfSize<decltype(of), AlignedBuffer, 2, 4, 8>(algorithm, size);
          });
        }
      }
      if (!in_segments) return KernelOfSize<Type, AlignedBuffer, 2, 4, 8>(algorithm, size);
      if constexpr (kBare) {
        return KernelOfSize<Type, InSegments<AlignedBuffer>, 2, 4, 8>(algorithm, size);
      }
      return nullptr;
    case CallKind::kAny:
      if (in_segments) return Kernel<Type, 0, InSegments<Buffer>>(algorithm);
      if constexpr (kBare) return KernelOfAnySize<Type, Buffer, 2, 4, 8>(algorithm, size);
      return Kernel<Type, 0, Buffer>(algorithm);
    case CallKind::kMany:
      if (!in_segments) return Kernel<Type, 0, Buffers>(algorithm);
      if constexpr (kBare) {
        return KernelOfAnySize<Type, InSegments<Buffers>, 2, 4>(algorithm, size);
      }
      return Kernel<Type, 0, InSegments<Buffers>>(algorithm);
  }
  return nullptr;
}

}  // namespace

}  // namespace jax_intranode
