// The all-reduce kernels of one element type, JIN_TYPE (compiled once for each type, so that a
// build uses all cores).
#include <type_traits>

#include "../kernels/one_shot.h"
#include "../kernels/two_shot.h"
#include "all_reduce_kernels.h"
#include "device_thread.h"

namespace jax_intranode {
namespace {

template <class Type, int N, class Call>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_one_shot(const __grid_constant__ DeviceGroup group,
                           const __grid_constant__ Call call) {
  DeviceThread thread(group.failure, group.timeout_ns, group.rank,
                      static_cast<uint32_t>(Algorithm::kOneShot));
  OneShot<Type, N>::Run(thread, group, call);
}

template <class Type, int N, class Call>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_two_shot(const __grid_constant__ DeviceGroup group,
                           const __grid_constant__ Call call) {
  DeviceThread thread(group.failure, group.timeout_ns, group.rank,
                      static_cast<uint32_t>(Algorithm::kTwoShot));
  TwoShot<Type, N>::Run(thread, group, call);
}

template <class Type, int N, class Call>
const void* Kernel(Algorithm algorithm) {
  return algorithm == Algorithm::kOneShot
             ? reinterpret_cast<const void*>(&jax_intranode_one_shot<Type, N, Call>)
             : reinterpret_cast<const void*>(&jax_intranode_two_shot<Type, N, Call>);
}

}  // namespace

// The types that models compute in have kernels of their own for sizes 2, 4 and 8. The other sizes,
// the other types, and calls of many buffers share one: each kernel costs build time.
template <>
const void* AllReduceKernel<ElementType::JIN_ELEMENT_TYPE>(Algorithm algorithm, int size,
                                                           bool many) {
  if (many) return Kernel<JIN_TYPE, 0, Buffers>(algorithm);
  if constexpr (std::is_same_v<JIN_TYPE::Packets, BarePackets>) {
    if (size == 2) return Kernel<JIN_TYPE, 2, Buffer>(algorithm);
    if (size == 4) return Kernel<JIN_TYPE, 4, Buffer>(algorithm);
    if (size == 8) return Kernel<JIN_TYPE, 8, Buffer>(algorithm);
  }
  return Kernel<JIN_TYPE, 0, Buffer>(algorithm);
}

}  // namespace jax_intranode
