#include "../kernels/types.h"
#include "device_thread.h"
#include "launch.h"
#include "signals.h"

namespace jax_intranode {
namespace {

// Each thread sets a word. Whoever sees it set also sees what came before.
JIN_FN void Set(const Words& words) {
  if (threadIdx.x >= words.count) return;
  __threadfence_system();
  Store(words.word[threadIdx.x], 1);
}

__global__ void jax_intranode_open(const __grid_constant__ DeviceGroup group, Algorithm algorithm,
                                   RingHeader* ring, Signals* own,
                                   const __grid_constant__ Words words) {
  DeviceThread thread(group, algorithm);
  thread.Enter(&ring->busy, &group.Header()->closed);
  thread.Admit();
  __syncthreads();  // only the first thread knows whether the ring was in use
  if (threadIdx.x == 0) Store(&own->opened, Load(&own->opened) + 1);
  if (threadIdx.x < group.size && threadIdx.x != group.rank) {
    TellOperation(group, threadIdx.x, Load(&group.Header()->operations));
  }
  Set(words);
}

__global__ void jax_intranode_post(const __grid_constant__ Words words) { Set(words); }

__global__ void jax_intranode_post_and_await(const __grid_constant__ DeviceGroup group,
                                             Algorithm algorithm,
                                             const __grid_constant__ Words posted,
                                             const __grid_constant__ Words awaited) {
  Set(posted);
  if (threadIdx.x >= awaited.count) return;
  DeviceThread thread(group, algorithm);
  uint32_t* const word = awaited.word[threadIdx.x];
  while (Load(word) == 0) {
    thread.WaitAnd(awaited.rank[threadIdx.x], [&] { CompareOperations(thread, group); });
  }
  Store(word, 0);
  __threadfence_system();
}

__global__ void jax_intranode_close(const __grid_constant__ DeviceGroup group, Algorithm algorithm,
                                    RingHeader* ring) {
  DeviceThread thread(group, algorithm);
  uint32_t* const operations = &group.Header()->operations;
  const uint32_t count = Load(operations);
  if (threadIdx.x < group.size && threadIdx.x != group.rank) {
    AwaitSameOperation(thread, group, threadIdx.x, count);
  }
  __syncthreads();  // all have read the count
  if (threadIdx.x == 0) {
    Store(operations, count + 1);
    Store(&ring->busy, 0);
  }
}

// Enough blocks to use the full memory bandwidth.
constexpr int kSumBlocks = 264;

// Packs of each rank that a thread has in flight.
constexpr int kUnrolled = 4;

template <class Type, int N>
__global__ void __launch_bounds__(512)
    jax_intranode_sum_partials(const __grid_constant__ Partials partials, int size, Pack* sum,
                               size_t packs) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto load = [&](int r, size_t at) {
    return static_cast<const Pack*>(partials.of_rank[r])[at];
  };
  if constexpr (N > 0) {
    for (; i + (kUnrolled - 1) * stride < packs; i += kUnrolled * stride) {
      Pack all[kUnrolled][N];
      JIN_UNROLL
      for (int k = 0; k < kUnrolled; ++k) {
        JIN_UNROLL
        for (int r = 0; r < N; ++r) all[k][r] = load(r, i + k * stride);
      }
      JIN_UNROLL
      for (int k = 0; k < kUnrolled; ++k) {
        sum[i + k * stride] = SumInRankOrder<Type, N>(all[k], N);
      }
    }
  }
  for (; i < packs; i += stride) {
    typename Type::Sum total;
    Type::Start(&total, load(0, i));
    for (int r = 1; r < size; ++r) Type::Add(&total, load(r, i));
    sum[i] = Type::Round(total);
  }
}

template <class Type>
const void* SumKernelOf(int size) {
  if (size == 2) return kListed<&jax_intranode_sum_partials<Type, 2>>;
  if (size == 4) return kListed<&jax_intranode_sum_partials<Type, 4>>;
  if (size == 8) return kListed<&jax_intranode_sum_partials<Type, 8>>;
  return kListed<&jax_intranode_sum_partials<Type, 0>>;
}

const void* SumKernel(ElementType type, int size) {
  return type == ElementType::kBF16 ? SumKernelOf<BF16>(size) : SumKernelOf<F16>(size);
}

}  // namespace

cudaError_t OpenRing(const DeviceGroup& group, Algorithm algorithm, RingHeader* ring,
                     const Words& words, cudaStream_t stream) {
  return Launch<&jax_intranode_open>(1, kMaxSlots, stream, group, algorithm, ring,
                                     SignalsOf(group, group.rank), words);
}

cudaError_t Post(const Words& words, cudaStream_t stream) {
  return Launch<&jax_intranode_post>(1, kMaxSlots, stream, words);
}

cudaError_t PostAndAwait(const DeviceGroup& group, Algorithm algorithm, const Words& posted,
                         const Words& awaited, cudaStream_t stream) {
  const bool few = posted.count <= 32 && awaited.count <= 32;
  return Launch<&jax_intranode_post_and_await>(1, few ? 32 : kMaxSlots, stream, group, algorithm,
                                               posted, awaited);
}

cudaError_t CloseRing(const DeviceGroup& group, Algorithm algorithm, RingHeader* ring,
                      cudaStream_t stream) {
  return Launch<&jax_intranode_close>(1, 32, stream, group, algorithm, ring);
}

cudaError_t SumPartials(ElementType type, const Partials& partials, int size, void* sum,
                        size_t packs, cudaStream_t stream) {
  Pack* to = static_cast<Pack*>(sum);
  void* arguments[] = {const_cast<Partials*>(&partials), &size, &to, &packs};
  return cudaLaunchKernel(SumKernel(type, size), dim3(kSumBlocks), dim3(512), arguments, 0, stream);
}

}  // namespace jax_intranode
