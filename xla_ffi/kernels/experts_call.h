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
  const void* in;      // `tokens` rows
  void* out;           // `capacity` rows
  const int32_t* ids;  // for each token and choice; others than those of all experts: none
  Buffer weights;      // in: of each id; out: those of all ranks
  int32_t *places, *ranks, *sizes, *used, *dropped;  // results; the first two as in ExpertsCall
  uint32_t row_bytes, tokens, choices, capacity, experts;  // experts: of a rank
  bool aligned;      // all rows begin and end at multiples of 16 bytes
  bool aligned_ids;  // the ids begin at one
};

inline uint64_t DigestOf(const RoutedCall& c, uint64_t digest) {
  for (const uint64_t part : {c.row_bytes, c.tokens, c.choices, c.capacity, c.experts}) {
    digest = digest * 1000003 + part;
  }
  return digest;
}

// The most ids of a rank (of twice as many the separate kernels were faster on 2 H100), and of all
// ranks together, where those of each fill whole packs; the most experts of a rank; and into how
// many parts a block divides the ids.
constexpr uint32_t kMostIdsOfRank = 1024, kMostRoutedIds = 4096;
constexpr uint32_t kMostRoutedExperts = 254, kMostRoutedParts = 16;

// Bytes of an epoch buffer for the weights, for the ids, and for all.
JIN_HOST_FN size_t RoutedWeightBytes(int size, size_t ids) {
  return (size - 1) * PacksOf(ids * sizeof(float)) * sizeof(Pack);
}
JIN_HOST_FN size_t RoutedIdBytes(int size, size_t ids, int blocks) {
  return size_t(size - 1) * blocks * PacksOf(ids) * sizeof(Pack);
}
inline size_t RoutedBytes(int size, size_t ids, int blocks, size_t bytes) {
  return RoutedWeightBytes(size, ids) + RoutedIdBytes(size, ids, blocks) +
         (size - 1) * PacksOf(bytes) * sizeof(Pack);
}
// Whether such a call fits an epoch buffer: of a rank's ids, experts, and bytes of whole packs.
inline bool RoutedFits(int size, size_t ids, size_t experts, int blocks, size_t bytes,
                       size_t epoch_buffer_bytes) {
  return ids > 0 && ids <= kMostIdsOfRank && size * PacksOf(ids) * sizeof(Pack) <= kMostRoutedIds &&
         experts > 0 && experts <= kMostRoutedExperts &&
         RoutedBytes(size, ids, blocks, bytes) <= epoch_buffer_bytes;
}

// The layout of a dispatch: from the experts that the tokens of all ranks have chosen.
struct LayoutCall {
  const int32_t* gathered;  // of each rank: for each token and choice the id + 1, then the weights
  int32_t *places, *ranks, *sizes, *used, *dropped;
  uint32_t rank, size, tokens, choices, experts, capacity;  // experts: of a rank
};

}  // namespace jax_intranode
