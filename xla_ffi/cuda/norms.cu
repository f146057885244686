// The kernels of psums and reduce-scatters that add a residual and normalize rows, and their
// launch. A block works on one row after another.
#include "../kernels/norm_protocol.h"
#include "device_thread.h"
#include "launch.h"

namespace jax_intranode {
namespace {

constexpr uint32_t kWarp = 32;

// The thread context of norm_protocol.h. The block's threads are a power of 2, at least a warp.
class RowThread : public DeviceThread {
 public:
  static constexpr int kRowThreads = kMaxThreads;
  using DeviceThread::DeviceThread;

  __device__ size_t FirstUnit() const { return 0; }

  // First within warps; then the sums of warps are neighbours, those of the threads' first packs
  // before those of their second ones. Each warp adds them all. Two buffers take turns: a thread
  // that writes one again has passed a barrier that all its readers reached after reading.
  template <uint32_t kMost>
  __device__ float Total(float (&v)[kMost], uint32_t count) {
    constexpr uint32_t kMostWarps = kMaxThreads / kWarp;
    __shared__ float buffers[2][kMost * kMostWarps];
    float* const sums = buffers[turn_];
    turn_ ^= 1;
    const uint32_t warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (uint32_t j = 0; j < kMost; ++j) {
      if (j >= count) break;
      v[j] = OfLanes(v[j], kWarp);
      if (lane == 0) sums[j * warps + threadIdx.x / kWarp] = v[j];
    }
    __syncthreads();
    const uint32_t sum_count = count * warps, of_lane = max(1u, sum_count / kWarp);
    float own[kMost];
#pragma unroll
    for (uint32_t j = 0; j < kMost; ++j) {
      if (j < of_lane) own[j] = sums[(lane * of_lane + j) % sum_count];
    }
    return OfLanes(TotalOfPairs(own, of_lane), sum_count);
  }

 private:
  // Adds the values of neighbouring lanes; `lanes` is a power of 2.
  __device__ static float OfLanes(float v, uint32_t lanes) {
#pragma unroll
    for (uint32_t apart = 1; apart < kWarp; apart *= 2) {
      if (apart < lanes) v = Plus(v, __shfl_xor_sync(0xFFFFFFFFu, v, apart));
    }
    return v;
  }

  int turn_ = 0;
};

template <class Type, int N, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_norm(const __grid_constant__ DeviceGroup group,
                       const __grid_constant__ NormCall call) {
  RowThread thread(group, call.algorithm);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group);
    return;
  }
  Norm<Type, N, kAligned>::Run(thread, group, call);
}

// World size 2 has a kernel of its own; the others share one, because each costs build time.
template <class Type>
const void* KernelOf(int size, bool aligned) {
  if (!aligned) return kListed<&jax_intranode_norm<Type, 0, false>>;
  return size == 2 ? kListed<&jax_intranode_norm<Type, 2, true>>
                   : kListed<&jax_intranode_norm<Type, 0, true>>;
}

}  // namespace

const void* NormKernel(ElementType type, int size, bool aligned) {
  if (!HasNorm(type)) return nullptr;
  return AnyBare::Visit(type, [=](auto of) { return KernelOf<decltype(of)>(size, aligned); });
}

}  // namespace jax_intranode
