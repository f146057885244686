// The kernels of mixtures of experts: the exchanges, and the layout.
#include "../kernels/experts.h"
#include "../kernels/routed_dispatch.h"
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

// The thread context of routed_dispatch.h.
class RoutingThread : public DeviceThread {
 public:
  static constexpr uint32_t kLanes = 32;

  using DeviceThread::DeviceThread;

  __device__ SameLanes Same(uint32_t v) const {
    uint32_t same = ~0u;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const bool has = (v >> bit & 1) != 0;
      const uint32_t those = __ballot_sync(~0u, has);
      same &= has ? those : ~those;
    }
    const uint32_t before = (1u << threadIdx.x % kLanes) - 1;
    return {__popc(same & before), __popc(same)};
  }
  __device__ void SyncLanes() const { __syncwarp(); }
  __device__ void Add(uint32_t* sum, uint32_t v) const { atomicAdd(sum, v); }
};
static_assert(kMaxThreads <= kMostRoutedParts * RoutingThread::kLanes);

template <int N>
__global__ void __launch_bounds__(kMaxThreads, 1)
    jax_intranode_routed_dispatch(const __grid_constant__ DeviceGroup group,
                                  const __grid_constant__ RoutedCall call) {
  RoutingThread thread(group, Algorithm::kRoutedDispatch);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group);
    return;
  }
  __shared__ RoutingTable table;
  const uint32_t epoch = Begin(thread, group);
  uint32_t step = 0;
  RoutedDispatch<N>::Run(thread, group, call, table, epoch, &step);
  End(thread, group, epoch);
}

template <int N>
const void* KernelOf(Algorithm algorithm, ElementType type) {
  if (algorithm == Algorithm::kRoutedDispatch) return kListed<&jax_intranode_routed_dispatch<N>>;
  if (algorithm == Algorithm::kDispatch) return kListed<&jax_intranode_dispatch<N>>;
  return type == ElementType::kF32    ? kListed<&jax_intranode_combine<F32, N>>
         : type == ElementType::kBF16 ? kListed<&jax_intranode_combine<BF16, N>>
                                      : kListed<&jax_intranode_combine<F16, N>>;
}

// The layout. `parts` blocks place the rows of each expert of the rank, each those of a part of the
// ids; the last block counts what concerns all. Each block counts for itself what it needs of the
// others, so blocks need not wait for each other. A warp has a part of the ids, in order.
constexpr uint32_t kLayoutThreads = 1024;

// Id i of a rank; large for none.
__device__ uint32_t IdOf(const LayoutCall& c, uint32_t rank, uint32_t i) {
  return static_cast<uint32_t>(__ldg(c.gathered + size_t{2} * rank * c.tokens * c.choices + i)) - 1;
}

// Calls `f(i, rank, experts)` for ids i to i + 3 from `begin` on: by lane `lane` of `lanes`, which
// all make the same number of calls. experts: their numbers on this rank, large for those of other
// ranks and behind the end.
template <class F>
__device__ void ForEachFour(const LayoutCall& c, uint32_t begin, uint32_t end, uint32_t lane,
                            uint32_t lanes, const F& f) {
  const uint32_t per_rank = c.tokens * c.choices, first = c.rank * c.experts;
  for (uint32_t rank = begin / per_rank; begin < end; ++rank) {
    const uint32_t stop = min(end, (rank + 1) * per_rank);
#pragma unroll 4
    for (uint32_t at = begin; at < stop; at += 4 * lanes) {
      const uint32_t i = at + 4 * lane, in_rank = i - rank * per_rank;
      uint32_t experts[4] = {~0u, ~0u, ~0u, ~0u};
      if (per_rank % 4 != 0) {
        for (uint32_t k = 0; k < 4; ++k) {
          if (i + k < stop) experts[k] = IdOf(c, rank, in_rank + k) - first;
        }
      } else if (i < stop) {
        const int4 ids = __ldg(
            reinterpret_cast<const int4*>(c.gathered + size_t{2} * rank * per_rank + in_rank));
        experts[0] = ids.x - 1 - first;
        experts[1] = ids.y - 1 - first;
        experts[2] = ids.z - 1 - first;
        experts[3] = ids.w - 1 - first;
      }
      f(i, rank, experts);
    }
    begin = stop;
  }
}

// The rows of this rank, those of the experts before one, and those of this one.
struct RowCounts {
  uint32_t here, lower, own;
};

// The sums over all threads; `*before`: of `own` over the warps before this one.
__device__ RowCounts SumOfThreads(const RowCounts& counts, uint32_t* before) {
  static_assert(kLayoutThreads == 32 * 32);
  __shared__ RowCounts of_warps[32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto sum = [](const RowCounts& c) -> RowCounts {
    return {__reduce_add_sync(~0u, c.here), __reduce_add_sync(~0u, c.lower),
            __reduce_add_sync(~0u, c.own)};
  };
  const RowCounts of_warp = sum(counts);
  __syncthreads();  // nobody reads the sums of the last call any more
  if (lane == 0) of_warps[warp] = of_warp;
  __syncthreads();
  const RowCounts of_lane = of_warps[lane];
  *before = __reduce_add_sync(~0u, lane < warp ? of_lane.own : 0);
  return sum(of_lane);
}

// Limits of the ids that are kept, for each rank, where there is no room for all: the ids of a
// token, on all ranks, come before those of the next one.
__device__ void Limit(const LayoutCall& c, uint32_t* limits) {
  uint32_t kept = 0;
  for (uint32_t first = 0; first < c.tokens && kept <= c.capacity; first += kLayoutThreads) {
    const uint32_t p = first + threadIdx.x;
    const auto is_here = [&](uint32_t rank, uint32_t j) {
      return IdOf(c, rank, p * c.choices + j) - c.rank * c.experts < c.experts;
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
    uint32_t before;
    const uint32_t all = SumOfThreads({0, 0, count}, &before).own;
    uint32_t number = kept + before + sum - count;
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
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t parts = (gridDim.x - 1) / c.experts, expert = blockIdx.x / parts;
  const uint32_t ids = c.size * c.tokens * c.choices;
  __shared__ uint32_t limits[kMaxRanks], dropped[kMaxRanks];
  if (threadIdx.x < kMaxRanks) {
    limits[threadIdx.x] = ids;
    dropped[threadIdx.x] = 0;
  }
  __syncthreads();
  const auto is_kept = [&](uint32_t i, uint32_t rank, uint32_t expert) {
    return expert < c.experts && i < limits[rank];
  };

  const uint32_t of_warp = (ids + 4 * kLayoutThreads - 1) / (4 * kLayoutThreads) * 128;
  const uint32_t begin = min(warp * of_warp, ids), end = min(begin + of_warp, ids);
  RowCounts all;
  uint32_t row;
  const auto count = [&] {
    RowCounts kept = {};
    ForEachFour(c, begin, end, lane, 32, [&](uint32_t i, uint32_t rank, const uint32_t* experts) {
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        const bool here = is_kept(i + k, rank, experts[k]);
        kept.here += here;
        kept.lower += here && experts[k] < expert;
        kept.own += here && experts[k] == expert;
      }
    });
    all = SumOfThreads(kept, &row);
    row += all.lower;
  };
  count();
  const bool overflows = all.here > c.capacity;
  if (overflows) {
    Limit(c, limits);
    count();
  }
  if (expert < c.experts && warp * parts / 32 == blockIdx.x % parts) {
    ForEachFour(c, begin, end, lane, 32, [&](uint32_t i, uint32_t rank, const uint32_t* experts) {
      uint32_t own = 0;  // of the four, as bits
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        own |= (experts[k] == expert && is_kept(i + k, rank, expert)) << k;
      }
      if (__ballot_sync(~0u, own != 0) == 0) return;
      uint32_t before = row;
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        const uint32_t lanes = __ballot_sync(~0u, own >> k & 1);
        before += __popc(lanes & ((1u << lane) - 1));
        row += __popc(lanes);
      }
      for (; own != 0; own &= own - 1)
        c.places[i + __ffs(own) - 1] = static_cast<int32_t>(before++);
    });
  }
  if (expert < c.experts) {
    if (threadIdx.x == 0) c.sizes[expert] = static_cast<int32_t>(all.own);
  } else {
    if (threadIdx.x == 0) *c.used = static_cast<int32_t>(all.here);
    if (overflows) {
      ForEachFour(c, begin, end, lane, 32, [&](uint32_t i, uint32_t rank, const uint32_t* experts) {
        for (uint32_t k = 0; k < 4; ++k) {
          if (experts[k] < c.experts && !is_kept(i + k, rank, experts[k])) {
            atomicAdd(&dropped[rank], 1);
          }
        }
      });
    }
    __syncthreads();
    if (threadIdx.x < c.size) c.dropped[threadIdx.x] = static_cast<int32_t>(dropped[threadIdx.x]);
  }

  // What is not kept, and the ranks of the own tokens: each block writes a part.
  const uint32_t part = (ids + 4 * gridDim.x - 1) / (4 * gridDim.x) * 4;
  const uint32_t stop = min((blockIdx.x + 1) * part, ids);
  ForEachFour(c, min(blockIdx.x * part, ids), stop, threadIdx.x, kLayoutThreads,
              [&](uint32_t i, uint32_t rank, const uint32_t* experts) {
                for (uint32_t k = 0; k < 4; ++k) {
                  if (i + k >= min(stop, (rank + 1) * c.tokens * c.choices)) return;
                  if (is_kept(i + k, rank, experts[k])) continue;
                  c.places[i + k] = experts[k] < c.experts ? -2 : -1;
                }
              });
  for (uint32_t p = blockIdx.x * kLayoutThreads + threadIdx.x; p < c.tokens;
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
  const uint32_t parts = call.size * call.tokens * call.choices > 8192 ? 4 : 1;
  return Launch<&jax_intranode_layout>(static_cast<int>(parts * call.experts) + 1, kLayoutThreads,
                                       stream, call);
}

}  // namespace jax_intranode
