// Words in device memory by which the ranks of a collective matmul signal each other.
//
// The cuBLASLt pipeline uses two words for each slot of a ring:
//
//   granted[p][i]  in the sender's memory: slot i of rank p's ring is free for this rank's data
//   arrived[p][i]  in the receiver's memory: rank p's data lie in slot i
//
// Such a word has one writer of 1, rank p, and one writer of 0, its owner, which resets it after it
// has seen the 1. There is no epoch and no counter, so a call that is launched, captured or
// replayed does the same. pipelined_matmul.h says why a word is always reset before it is set
// again. tests/native/pipeline_test.cc checks it.
//
// The fused kernel uses `ring_grant` and flags in the rings: fused_send.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "collectives.h"
#include "matmul_limits.h"

namespace jax_intranode {

constexpr int kMaxSlots = 64;  // of the pipeline

// In the second half of a region's header (group.h).
struct Signals {
  uint32_t granted[kMaxRanks][kMaxSlots];
  uint32_t arrived[kMaxRanks][kMaxSlots];
  // The fused kernel: a peer grants its ring by its word. The upper half of the word is the number
  // of the operation on the peer's ring, the lower half the number of the operation in the group.
  uint64_t ring_grant[kMaxRanks];
  uint32_t opened;  // collective matmuls of this group so far
};
static_assert(sizeof(Signals) <= kHeaderBytes / 2);

// A ring buffer, which all groups of a device share: this header, one flag per chunk of data, then
// the data (matmul_limits.h). All words but the flags are used by their owner only.
struct RingHeader {
  uint32_t busy;            // not 0 while an operation runs; the fused kernel: claimed work lists
  uint32_t operations;      // of the fused kernel that have ended
  uint32_t left;            // blocks of the running fused kernel that have ended
  uint32_t claimed_chunks;  // of the running fused kernel
};
static_assert(sizeof(RingHeader) <= kRingHeaderBytes);

JIN_HOST_FN Signals* SignalsOf(const Group& group, int rank) {
  return reinterpret_cast<Signals*>(group.region[rank] + kHeaderBytes / 2);
}

// Words to set or to wait for, and the rank that each belongs to.
struct Words {
  int count;
  uint32_t* word[kMaxSlots];
  int8_t rank[kMaxSlots];

  void Append(uint32_t* added, int of_rank) {
    word[count] = added;
    rank[count++] = static_cast<int8_t>(of_rank);
  }
};

// Begins an operation: marks the ring as busy, counts the operation, tells the peers what it is,
// then sets `words`. The kernel gives up if the ring is in use or if the region was closed.
cudaError_t OpenRing(const DeviceGroup& group, Algorithm algorithm, RingHeader* ring,
                     const Words& words, cudaStream_t stream);
// Sets words. Whoever sees them set also sees what ran on the stream before.
cudaError_t Post(const Words& words, cudaStream_t stream);
// Sets the words `posted` as Post does, then waits until the words `awaited` are set and resets
// them.
cudaError_t PostAndAwait(const DeviceGroup& group, Algorithm algorithm, const Words& posted,
                         const Words& awaited, cudaStream_t stream);
// Ends an operation: the next one may use the ring. The kernel gives up if a peer has told that it
// runs another operation.
cudaError_t CloseRing(const DeviceGroup& group, Algorithm algorithm, RingHeader* ring,
                      cudaStream_t stream);

// Sums `packs` packs of bf16 or f16 of every rank, in rank order, in f32, rounded once.
struct Partials {
  const void* of_rank[kMaxRanks];
};
cudaError_t SumPartials(ElementType type, const Partials& partials, int size, void* sum,
                        size_t packs, cudaStream_t stream);

}  // namespace jax_intranode
