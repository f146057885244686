// What a rank is asked to do in a dispatch or a combine of a mixture of experts.
#pragma once

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

// The layout of a dispatch: from the experts that the tokens of all ranks have chosen.
struct LayoutCall {
  const int32_t* gathered;  // of each rank: for each token and choice the id + 1, then the weights
  int32_t *places, *ranks, *sizes, *used, *dropped;
  uint32_t rank, size, tokens, choices, experts, capacity;  // experts: of a rank
};

}  // namespace jax_intranode
