// A collective matmul as its callers describe it, whichever way it is done. No XLA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives.h"
#include "matmul_plan.h"
#include "signals.h"

namespace jax_intranode {

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a rank of a group has for collective matmuls.
struct MatmulMember {
  int device;
  DeviceGroup group;
  char* ring[kMaxRanks];  // each rank's ring, as this rank addresses it
  size_t ring_bytes;

  // The data of a rank's ring, and their size.
  char* Data(int rank) const { return ring[rank] + RingDataOffset(ring_bytes); }
  size_t data_bytes() const { return ring_bytes - RingDataOffset(ring_bytes); }
};

// One call on one rank. The ranks' operands are joined along `rows`.
//
//   all-gather + matmul      one x [outer, rows, k]; several matrices w, each with a product
//                            [outer, ranks * rows, n]
//   matmul + reduce-scatter  one product [outer, rows, n], the sum of the terms x_i @ w_i with x_i
//                            [outer, ranks * rows, k_i]; only the fused kernel takes several terms
struct MatmulCall {
  ElementType type;  // bf16 or f16
  bool transposed;   // each w is [n, k], not [k, n]
  int64_t outer, rows;
  std::vector<const void*> xs;
  std::vector<int64_t> ks;  // of each x
  std::vector<const void*> ws;
  std::vector<int64_t> ns;  // of each product
  std::vector<void*> products;
  void* gathered = nullptr;  // all-gather: all ranks' x, [outer, ranks * rows, k], if asked for
  // Weight gradients [n, k_i], which only the fused kernel computes: wgrad_lhs^T @ x_i over all
  // rows, with wgrad_lhs [outer, ranks * rows, n]. An all-gather contracts the gathered x.
  const void* wgrad_lhs = nullptr;
  std::vector<void*> wgrads;
  void* scratch;

  // The x of an all-gather, and its columns.
  const void* x() const { return xs[0]; }
  int64_t k() const { return ks[0]; }
};

}  // namespace jax_intranode
