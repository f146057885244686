// The kernels of mixtures of experts: the exchanges, and the layout.
#include "../kernels/experts.h"
#include "device_thread.h"
#include "experts.h"
#include "launch.h"

namespace jax_intranode {
namespace {

template <class Type, int N, bool kCombines>
__device__ void Run(const DeviceGroup& group, const ExpertsCall& call) {
  DeviceThread thread(group, kCombines ? Algorithm::kCombine : Algorithm::kDispatch);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group);
    return;
  }
  const uint32_t epoch = Begin(thread, group);
  uint32_t step = 0;
  Experts<Type, N, kCombines>::Run(thread, group, call, epoch, &step);
  End(thread, group, epoch);
}

template <int N>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_dispatch(const __grid_constant__ DeviceGroup group,
                           const __grid_constant__ ExpertsCall call) {
  Run<CopiedAs<BF16>, N, false>(group, call);
}

template <class Type, int N>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_combine(const __grid_constant__ DeviceGroup group,
                          const __grid_constant__ ExpertsCall call) {
  Run<Type, N, true>(group, call);
}

template <int N>
const void* KernelOf(Algorithm algorithm, ElementType type) {
  if (algorithm == Algorithm::kDispatch) return kListed<&jax_intranode_dispatch<N>>;
  return type == ElementType::kF32    ? kListed<&jax_intranode_combine<F32, N>>
         : type == ElementType::kBF16 ? kListed<&jax_intranode_combine<BF16, N>>
                                      : kListed<&jax_intranode_combine<F16, N>>;
}

// The layout. Block b < experts of the rank places the rows of that expert; the last one writes
// what concerns all. Each block counts for itself what it needs of the others, so blocks need not
// wait for each other.
constexpr uint32_t kLayoutThreads = 512;

// The sum of the values of the threads before this one; `*total`: that of all.
__device__ uint32_t SumBefore(uint32_t value, uint32_t* total) {
  __shared__ uint32_t of_warps[kLayoutThreads / 32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value;
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // nobody reads the sums of the last call any more
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  uint32_t before = 0, all = 0;
  for (uint32_t k = 0; k < kLayoutThreads / 32; ++k) {
    before += k < warp ? of_warps[k] : 0;
    all += of_warps[k];
  }
  *total = all;
  return before + sum - value;
}

__global__ void __launch_bounds__(kLayoutThreads) jax_intranode_layout(const LayoutCall c) {
  const uint32_t ids = c.size * c.tokens * c.choices, per_rank = c.tokens * c.choices;
  const uint32_t each = (ids + kLayoutThreads - 1) / kLayoutThreads;
  const uint32_t begin = min(threadIdx.x * each, ids), end = min(begin + each, ids);
  const auto expert_of = [&](uint32_t i) {  // of this rank; large if it is none
    return static_cast<uint32_t>(c.ids[i] - c.rank * static_cast<int>(c.experts));
  };
  // The place of id i in the order in which rows are kept: token, rank, choice.
  const auto turn_of = [&](uint32_t i) {
    const uint32_t rank = i / per_rank, in_rank = i % per_rank;
    const uint32_t token = in_rank / c.choices, choice = in_rank % c.choices;
    return (token * c.size + rank) * c.choices + choice;
  };

  __shared__ uint32_t first_dropped;  // in that order
  uint32_t all;
  if (ids > c.capacity) {
    const auto id_of = [&](uint32_t turn) {
      const uint32_t of_token = c.size * c.choices, token = turn / of_token;
      const uint32_t rank = turn % of_token / c.choices, choice = turn % c.choices;
      return rank * per_rank + token * c.choices + choice;
    };
    uint32_t count = 0;
    for (uint32_t turn = begin; turn < end; ++turn) count += expert_of(id_of(turn)) < c.experts;
    if (threadIdx.x == 0) first_dropped = ids;
    const uint32_t before = SumBefore(count, &all);
    if (before <= c.capacity && before + count > c.capacity) {
      uint32_t number = before;
      for (uint32_t turn = begin; turn < end; ++turn) {
        if (expert_of(id_of(turn)) >= c.experts) continue;
        if (number++ == c.capacity) first_dropped = turn;
      }
    }
    __syncthreads();
  }
  const auto kept = [&](uint32_t i) { return ids <= c.capacity || turn_of(i) < first_dropped; };

  if (blockIdx.x < c.experts) {
    uint32_t count = 0, lower = 0;
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t expert = expert_of(i);
      if (expert > blockIdx.x || !kept(i)) continue;
      count += expert == blockIdx.x;
      lower += expert < blockIdx.x;
    }
    uint32_t first, rows;
    SumBefore(lower, &first);
    uint32_t row = SumBefore(count, &rows) + first;
    for (uint32_t i = begin; i < end; ++i) {
      if (expert_of(i) == blockIdx.x && kept(i)) c.places[i] = static_cast<int32_t>(row++);
    }
    if (threadIdx.x == 0) c.sizes[blockIdx.x] = static_cast<int32_t>(rows);
    return;
  }

  __shared__ int32_t dropped[kMaxRanks];
  if (threadIdx.x < kMaxRanks) dropped[threadIdx.x] = 0;
  __syncthreads();
  uint32_t count = 0;
  for (uint32_t i = begin; i < end; ++i) {
    const bool is_here = expert_of(i) < c.experts;
    if (is_here && kept(i)) {
      ++count;
      continue;
    }
    c.places[i] = is_here ? -2 : -1;
    if (is_here) atomicAdd(&dropped[i / per_rank], 1);
  }
  SumBefore(count, &all);
  if (threadIdx.x == 0) *c.used = static_cast<int32_t>(all);
  if (threadIdx.x < c.size) c.dropped[threadIdx.x] = dropped[threadIdx.x];
  for (uint32_t p = threadIdx.x; p < c.tokens; p += kLayoutThreads) {
    uint32_t ranks = 0;
    for (uint32_t j = 0; j < c.choices; ++j) {
      const auto id = static_cast<uint32_t>(c.ids[c.rank * per_rank + p * c.choices + j]);
      if (id < c.size * c.experts) ranks |= 1u << id / c.experts;
    }
    c.ranks[p] = static_cast<int32_t>(ranks);
  }
}

}  // namespace

const void* ExpertsKernel(Algorithm algorithm, ElementType type, int size) {
  return size == 2 ? KernelOf<2>(algorithm, type) : KernelOf<0>(algorithm, type);
}

cudaError_t LaunchLayout(const LayoutCall& call, cudaStream_t stream) {
  return Launch<&jax_intranode_layout>(static_cast<int>(call.experts) + 1, kLayoutThreads, stream,
                                       call);
}

}  // namespace jax_intranode
