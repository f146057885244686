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

// The layout. Block b < experts of the rank places the rows of that expert; the last one counts
// what concerns all. Each block counts for itself what it needs of the others, so blocks need not
// wait for each other. A warp has a part of the ids, in order.
constexpr uint32_t kLayoutThreads = 1024;

// Id i of a rank, and its number on this rank. They are large for none.
__device__ uint32_t IdOf(const LayoutCall& c, uint32_t rank, uint32_t i) {
  return static_cast<uint32_t>(__ldg(c.gathered + size_t{2} * rank * c.tokens * c.choices + i)) - 1;
}
__device__ uint32_t ExpertOf(const LayoutCall& c, uint32_t rank, uint32_t i) {
  return IdOf(c, rank, i) - c.rank * c.experts;
}

// Calls `f(i, rank, expert)` for the ids from `begin` on: by lane `lane` of `lanes`, which all make
// the same number of calls. expert: of this rank, large if it is none. i: large behind the end.
template <class F>
__device__ void ForEachId(const LayoutCall& c, uint32_t begin, uint32_t end, uint32_t lane,
                          uint32_t lanes, const F& f) {
  const uint32_t per_rank = c.tokens * c.choices;
  for (uint32_t rank = begin / per_rank; begin < end; ++rank) {
    const uint32_t stop = min(end, (rank + 1) * per_rank);
#pragma unroll 8
    for (uint32_t at = begin; at < stop; at += lanes) {
      const uint32_t i = at + lane;
      const bool is_one = i < stop;
      f(is_one ? i : ~0u, rank, is_one ? ExpertOf(c, rank, i - rank * per_rank) : ~0u);
    }
    begin = stop;
  }
}

// The sum of the values of the warps before this one; `*total`: that of all.
__device__ uint32_t SumOfWarpsBefore(uint32_t value, uint32_t* total) {
  static_assert(kLayoutThreads == 32 * 32);
  __shared__ uint32_t of_warps[32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // nobody reads the sums of the last call any more
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  const uint32_t of_warp = of_warps[lane];
  *total = __reduce_add_sync(~0u, of_warp);
  return __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
}

// Limits of the ids that are kept, for each rank, where there is no room for all: the ids of a
// token, on all ranks, come before those of the next one.
__device__ void Limit(const LayoutCall& c, uint32_t* limits) {
  uint32_t kept = 0;
  for (uint32_t first = 0; first < c.tokens && kept <= c.capacity; first += kLayoutThreads) {
    const uint32_t p = first + threadIdx.x;
    const auto is_here = [&](uint32_t rank, uint32_t j) {
      return ExpertOf(c, rank, p * c.choices + j) < c.experts;
    };
    uint32_t count = 0;
    for (uint32_t rank = 0; p < c.tokens && rank < c.size; ++rank) {
      for (uint32_t j = 0; j < c.choices; ++j) count += is_here(rank, j);
    }
    uint32_t sum = count;  // of the lanes up to this one
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, step);
      if (threadIdx.x % 32 >= step) sum += other;
    }
    uint32_t all;
    uint32_t number = kept + SumOfWarpsBefore(__shfl_sync(~0u, sum, 31), &all) + sum - count;
    kept += all;
    if (number > c.capacity || number + count <= c.capacity) continue;
    for (uint32_t at = 0; at < c.size * c.choices; ++at) {
      const uint32_t rank = at / c.choices, choice = at % c.choices;
      if (!is_here(rank, choice) || number++ != c.capacity) continue;
      for (uint32_t r = 0; r < c.size; ++r) {
        const uint32_t of_token = r < rank ? c.choices : r == rank ? choice : 0;
        limits[r] = (r * c.tokens + p) * c.choices + of_token;
      }
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kLayoutThreads) jax_intranode_layout(const LayoutCall c) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x;
  const uint32_t ids = c.size * c.tokens * c.choices;
  __shared__ uint32_t limits[kMaxRanks], dropped[kMaxRanks];
  if (threadIdx.x < kMaxRanks) {
    limits[threadIdx.x] = ids;
    dropped[threadIdx.x] = 0;
  }
  __syncthreads();
  if (ids > c.capacity) Limit(c, limits);
  const auto is_kept = [&](uint32_t i, uint32_t rank, uint32_t expert) {
    return expert < c.experts && i < limits[rank];
  };

  const uint32_t of_warp = (ids + kLayoutThreads - 1) / kLayoutThreads * 32;
  const uint32_t begin = min(warp * of_warp, ids), end = min(begin + of_warp, ids);
  uint32_t count = 0, lower = 0, rows, first;
  ForEachId(c, begin, end, lane, 32, [&](uint32_t i, uint32_t rank, uint32_t expert) {
    if (!is_kept(i, rank, expert)) return;
    count += expert == block;
    lower += expert < block;
  });
  SumOfWarpsBefore(__reduce_add_sync(~0u, lower), &first);
  uint32_t row = first + SumOfWarpsBefore(__reduce_add_sync(~0u, count), &rows);
  if (block < c.experts) {
    ForEachId(c, begin, end, lane, 32, [&](uint32_t i, uint32_t rank, uint32_t expert) {
      const bool is_own = expert == block && is_kept(i, rank, expert);
      const uint32_t own = __ballot_sync(~0u, is_own);
      if (is_own) c.places[i] = static_cast<int32_t>(row + __popc(own & ((1u << lane) - 1)));
      row += __popc(own);
    });
    if (threadIdx.x == 0) c.sizes[block] = static_cast<int32_t>(rows);
  } else {
    if (threadIdx.x == 0) *c.used = static_cast<int32_t>(first);
    ForEachId(c, begin, end, lane, 32, [&](uint32_t i, uint32_t rank, uint32_t expert) {
      if (expert < c.experts && !is_kept(i, rank, expert)) atomicAdd(&dropped[rank], 1);
    });
    __syncthreads();
    if (threadIdx.x < c.size) c.dropped[threadIdx.x] = static_cast<int32_t>(dropped[threadIdx.x]);
  }

  // What is not kept, and the ranks of the own tokens: each block writes a part.
  const uint32_t part = (ids + gridDim.x - 1) / gridDim.x;
  ForEachId(c, min(block * part, ids), min((block + 1) * part, ids), threadIdx.x, kLayoutThreads,
            [&](uint32_t i, uint32_t rank, uint32_t expert) {
              if (i >= ids || is_kept(i, rank, expert)) return;
              c.places[i] = expert < c.experts ? -2 : -1;
            });
  for (uint32_t p = block * kLayoutThreads + threadIdx.x; p < c.tokens;
       p += gridDim.x * kLayoutThreads) {
    uint32_t ranks = 0;
    for (uint32_t j = 0; j < c.choices; ++j) {
      const uint32_t id = IdOf(c, c.rank, p * c.choices + j);
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
