// The fused kernel: each warp of a block gets its role. See fused_matmul.h. fused_*.cu compile it
// for each element type.
//
// Why it ends
//   A sender warp waits for three things. First, a peer's ring, which the peer grants when the
//   first of its blocks begins. Second, the products of its own block. Third, the next work list of
//   its cluster, which the producer warp claims before the last tile of the list before it has been
//   multiplied. Before it waits for one of the first two, it publishes the chunks that it has sent.
//   When it waits for the third, it publishes them soon after. If chunks for a peer that is late
//   lie between chunks for others, the others wait, too, until that peer's kernel begins; and for
//   that it needs none of these chunks.
//
//   A math warpgroup waits for its turn, for a peer's ring if it stores there, and for flags.
//   All-gather: the flags of chunks that all ranks send without waiting for any product or weight
//   gradient. Reduce-scatter: the flags of products that each cluster computes before it waits for
//   any flag. (Weight gradients of a reduce-scatter wait for nothing. A warpgroup that waits for
//   peers had its turn after all those products, whoever multiplied them.) So no wait depends on
//   itself.
//
//   No wait depends on blocks that do not run yet, either. The work that peers wait for is not
//   assigned to blocks in advance: the blocks that run claim it, as work lists or chunks, and
//   finish it, however few they are. If it were assigned in advance, a collective of another stream
//   could occupy SMs of one rank where blocks of this kernel wait for them, while this kernel
//   occupies all SMs of another rank where the collective waits for them; neither would end.
//
//   A rank waits for peers that have not called the operation until the deadline passes.
#pragma once

#include "fused_feed.cuh"
#include "fused_kernel.h"
#include "fused_layout.cuh"
#include "fused_multiply.cuh"
#include "fused_send.cuh"

namespace jax_intranode {
namespace {

// Gives up if a peer has told that it runs another operation. The last thread of all calls it. A
// peer tells when it grants its ring, so its word has been here for long.
template <int kColumns>
JIN_FN void EndSameOperation(const Block<kColumns>& b) {
  const DeviceGroup& group = b.p.group;
  if (group.operation == 0) return;
  DeviceThread thread = b.Thread();
  uint32_t* const operations = &OwnHeader(b.p)->operations;
  const uint32_t count = Load(operations);
#pragma unroll 1
  for (int step = 1; step < b.p.size; ++step) {
    AwaitSameOperation(thread, group, RankAfter(b.p, step), count);
  }
  Store(operations, count + 1);
}

template <class Type, Layout kLayout, bool kWgrad, int kColumns>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    jax_intranode_fused_matmul(const __grid_constant__ FusedParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  using Config = TileConfig<kColumns>;
  RingHeader* const ring = OwnRing(p);
  Signals* const own = SignalsOf(p.group, p.rank);
  const uint32_t operations = Load(&own->opened);
  const Block<kColumns> b{p, (SharedAddress(memory) + 1023) & ~1023u, Load(&ring->operations) + 1};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      BarrierInit(b.Full(stage), 1);
      // In each block one warpgroup releases a stage if they alternate, else both.
      BarrierInit(b.Empty(stage), (Config::kAlternate ? 1 : 2) * kClusterSize);
    }
    StoreShared(b.Stored(0), 0);
    StoreShared(b.Stored(1), 0);
    BarrierInitFence();
  }
  if (threadIdx.x <= kMaxClusters) StoreShared(b.ListAt(threadIdx.x), 0);
  // The first list is claimed while the cluster synchronises.
  const bool claims = threadIdx.x == 0 && RankInCluster() == 0;
  const uint32_t list = claims ? ClaimList(p) : 0;
  const uint32_t closed = claims ? Load(&OwnHeader(p)->closed) : 0;
  __syncwarp();
  ClusterSync();
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    KeepRegisters<Config::kOtherRegisters>();
    if (warp == 0) {
      if (claims) {
        if (list == 0) b.Thread().Admit(0, closed);
        AnnounceList(b, 0, list);
      }
      // The block that claimed the first list of all grants the ring to the peers.
      const int step = 1 + threadIdx.x;
      if (__shfl_sync(~0u, claims && list == 0, 0) && step < p.size) {
        Fence();
        StorePair(&SignalsOf(p.group, RankAfter(p, step))->ring_grant[p.rank],
                  static_cast<uint64_t>(b.operation) << 32 | (operations + 1));
        if (p.group.operation != 0) {
          TellOperation(p.group, RankAfter(p, step), Load(&OwnHeader(p)->operations));
        }
      }
      __syncwarp();
      Feeder<kLayout, kWgrad, kColumns>(b).Run();
    } else if (warp <= kSenderWarps) {
      if (Config::kWholeChunks && p.reduce_scatter) {
        p.direct ? PublishProducts(b, operations, warp - 1) : SendProducts(b, operations, warp - 1);
      } else {
        p.gathered == nullptr ? SendShard<false>(b, operations) : SendShard<true>(b, operations);
      }
    } else if (p.gathered != nullptr) {
      CopyArriving(b);
    }
  } else {
    TakeRegisters<Config::kMathRegisters>();
    Multiplier<Type, kLayout, kWgrad, kColumns>(b, operations).Run();
  }
  __syncwarp();
  ClusterSync();  // no block leaves while another one may still copy into its shared memory
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&ring->left, 1) == gridDim.x - 1) {
      EndSameOperation(b);
      ring->left = 0;
      ring->claimed_chunks = 0;
      Store(&ring->operations, b.operation);
      Store(&own->opened, operations + 1);
      Store(&ring->busy, 0);
    }
  }
#endif
}

template <class Type, Layout kLayout, bool kWgrad, int kColumns>
FusedKernel KernelOf() {
  return {
      reinterpret_cast<const void*>(&jax_intranode_fused_matmul<Type, kLayout, kWgrad, kColumns>),
      TileConfig<kColumns>::kBytes};
}
template <class Type, Layout kLayout>
FusedKernel KernelOfNarrow(int columns) {
  return columns == 128 ? KernelOf<Type, kLayout, false, 128>()
                        : KernelOf<Type, kLayout, false, 192>();
}
// Weight gradients are only computed with matrices [n, k], as those of input gradients are.
template <class Type>
FusedKernel KernelFor(bool transposed, bool wgrad, int columns) {
  if (wgrad) return KernelOf<Type, Layout::kKMajor, true, kWgradColumns>();
  if (columns == 224) return KernelOf<Type, Layout::kEither, false, 224>();
  if (columns == 256) return KernelOf<Type, Layout::kEither, false, 256>();
  return transposed ? KernelOfNarrow<Type, Layout::kKMajor>(columns)
                    : KernelOfNarrow<Type, Layout::kNMajor>(columns);
}

}  // namespace

#define JIN_FUSED_KERNELS(Type)                                                                \
  template <>                                                                                  \
  FusedKernel FusedKernelFor<ElementType::k##Type>(bool transposed, bool wgrad, int columns) { \
    return KernelFor<Type>(transposed, wgrad, columns);                                        \
  }

}  // namespace jax_intranode
