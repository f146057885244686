// Signals: words with which ranks of a collective matmul tell each other of their rings' slots.
//
//   granted[p][i]  in a sender's memory: slot i of rank p's ring is free for this rank's data
//   arrived[p][i]  in a receiver's memory: rank p's data lie in slot i
//
// A word has one setter, rank p, which only ever writes 1, and one resetter, its owner, which only
// ever writes 0, after it has seen the 1. No epoch and no counter: a call that is launched,
// captured or replayed does the same. (`lent` is another matter: fused_matmul.h.)
// collective_matmul.h says why a word is always read before it is set again.
#pragma once

#include <cuda_runtime_api.h>

#include "collectives.h"
#include "matmul_limits.h"

namespace jax_intranode {

constexpr int kMaxSlots = 64;

// In the second half of a region's header (group.h).
struct Signals {
  uint32_t granted[kMaxRanks][kMaxSlots];
  uint32_t arrived[kMaxRanks][kMaxSlots];
  uint64_t lent[kMaxRanks];  // by peers, for a fused operation (fused_matmul.h)
  uint32_t opened;           // collective matmuls so far
};
static_assert(sizeof(Signals) <= kHeaderBytes / 2);

// A ring, which all groups of a device share: this, then flags of fused operations, a word for each
// chunk of data, then data (matmul_limits.h).
struct RingHeader {
  uint32_t busy;         // not 0 while an operation uses it; lists that a fused one has drawn
  uint32_t fused;        // operations that have ended
  uint32_t left;         // blocks that have left the one that runs
  uint32_t drawn_items;  // items that a fused one has drawn
};
static_assert(sizeof(RingHeader) <= kRingHeaderBytes);

inline Signals* SignalsOf(const Group& group, int rank) {
  return reinterpret_cast<Signals*>(group.region[rank] + kHeaderBytes / 2);
}

// Words, and of which rank each of them tells.
struct Words {
  int count;
  uint32_t* word[kMaxSlots];
  int8_t rank[kMaxSlots];

  void Append(uint32_t* added, int of_rank) {
    word[count] = added;
    rank[count++] = static_cast<int8_t>(of_rank);
  }
};

// Gives up if the ring is in use or if the region was closed, counts the operation, sets the words.
cudaError_t OpenRing(const DeviceGroup& group, Algorithm algorithm, RingHeader* ring,
                     const Words& words, cudaStream_t stream);
// Sets the words. What ran on the stream before is seen by whoever sees them set.
cudaError_t Post(const Words& words, cudaStream_t stream);
// Sets the first words as Post, then waits until the second ones are set, and resets them.
cudaError_t PostAndAwait(const DeviceGroup& group, Algorithm algorithm, const Words& told,
                         const Words& awaited, cudaStream_t stream);
// Lets the next operation use the ring.
cudaError_t CloseRing(RingHeader* ring, cudaStream_t stream);

// Sums `packs` packs of every rank, in rank order, in f32, rounded once: bf16 or f16.
struct Partials {
  const void* of_rank[kMaxRanks];
};
cudaError_t SumPartials(ElementType type, const Partials& partials, int size, void* sum,
                        size_t packs, cudaStream_t stream);

// Loads the kernels of this file onto the current device.
cudaError_t LoadSignalKernels();

}  // namespace jax_intranode
