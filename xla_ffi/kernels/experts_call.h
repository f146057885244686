// What a rank is asked to do in a dispatch or a combine of a mixture of experts.
#pragma once

#include "buffers.h"
#include "ragged_call.h"

namespace jax_intranode {

// The most bytes of an epoch buffer that windows take: more would not stay in a GPU's L2 cache.
constexpr size_t kMostWindowBytes = size_t{16} << 20;

struct ExpertsCall {
  const void* in;         // dispatch: `tokens` rows; combine: `capacity` rows
  void* out;              // the other way round
  const float* weights;   // combine: for each rank, token and choice
  const int32_t* places;  // for each rank, token and choice: a row here; -1, -2: none (experts.h)
  const int32_t* ranks;   // for each token of this rank: the ranks of its experts, as bits
  const int32_t* used;    // dispatch: how many rows of the result have tokens
  uint32_t row_bytes, tokens, choices, capacity;
  uint32_t window;  // packs of a window of a stream (RaggedWindow)
  bool aligned;     // all rows begin and end at multiples of 16 bytes
};

// What the ranks of a call must agree on.
inline uint64_t DigestOf(const ExpertsCall& c, uint64_t digest) {
  for (const uint64_t part : {c.row_bytes, c.tokens, c.choices, c.capacity}) {
    digest = digest * 1000003 + part;
  }
  return digest;
}

// A dispatch that finds who goes where (routed_dispatch.h).
struct RoutedCall {
  ExpertsCall rows;  // without the layout
  Buffer ids;        // in: of each token and choice; others than those of all experts: none;
                     // out: places
  Buffer weights;    // in: of each id; out: those of all ranks
  int32_t *ranks, *sizes, *used, *dropped;  // results
  uint32_t experts;                         // of a rank
};

// How many threads of a warp have the same value: before a thread, and in all.
struct SameLanes {
  uint32_t before, all;
};

inline uint64_t DigestOf(const RoutedCall& c, uint64_t digest) {
  return DigestOf(c.rows, digest * 1000003 + c.experts);
}

// The most ids of a rank (of twice as many the separate kernels were faster on 2 H100), and of all
// ranks together; the most experts of a rank; and into how many parts a block divides the ids.
constexpr uint32_t kMostIdsOfRank = 1024, kMostRoutedIds = 4096;
constexpr uint32_t kMostRoutedExperts = 254, kMostRoutedParts = 16;

// Whether an epoch buffer has room for such a call: for a rank's ids, their weights, and `bytes` of
// rows, which are whole packs.
inline bool RoutedFits(int size, size_t ids, size_t experts, int blocks, size_t bytes,
                       size_t epoch_buffer_bytes) {
  const size_t packs = blocks * PacksOf(ids) + PacksOf(ids * sizeof(float)) + PacksOf(bytes);
  return ids > 0 && ids <= kMostIdsOfRank && size * ids <= kMostRoutedIds && experts > 0 &&
         experts <= kMostRoutedExperts && (size - 1) * packs * sizeof(Pack) <= epoch_buffer_bytes;
}

// The layout of a dispatch: from the experts that the tokens of all ranks have chosen.
struct LayoutCall {
  const int32_t* gathered;  // of each rank: for each token and choice the id + 1, then the weights
  int32_t *places, *ranks, *sizes, *used, *dropped;
  uint32_t rank, size, tokens, choices, experts, capacity;  // experts: of a rank
};

}  // namespace jax_intranode
