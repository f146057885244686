// What a collective matmul works on, however it is done. No XLA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives.h"
#include "matmul_plan.h"
#include "signals.h"

namespace jax_intranode {

// What a rank of a group has for collective matmuls.
struct MatmulMember {
  int device;
  DeviceGroup group;
  char* ring[kMaxRanks];  // each rank's ring, as this rank addresses it
  size_t ring_bytes;

  // The data of a rank's ring, and how many bytes of them there are.
  char* Data(int rank) const { return ring[rank] + RingDataOffset(ring_bytes); }
  size_t data_bytes() const { return ring_bytes - RingDataOffset(ring_bytes); }
};

// [outer, rows, k] on each rank, joined along `rows`: one operand and its products with several
// matrices; or, of a sum that one kernel does, several with a matrix each, whose products are
// added.
struct MatmulCall {
  ElementType type;  // bf16 or f16
  bool transposed;   // matrices are [n, k]
  int64_t outer, rows;
  std::vector<const void*> xs;
  std::vector<int64_t> ks;
  std::vector<const void*> ws;
  std::vector<int64_t> ns;
  std::vector<void*> products;  // of each w, [outer, ranks * rows, n]; or the sum, [outer, rows, n]
  void* gathered = nullptr;     // [outer, ranks * rows, k], or none
  // Derivatives by matrices, which one kernel multiplies beside it, or none: [n, k] each, of all
  // rows of an operand [outer, ranks * rows, n], transposed, and of what is gathered, or of the
  // first xs of a sum.
  const void* beside = nullptr;
  std::vector<void*> derivatives;
  void* scratch;

  // Of one operand.
  const void* x() const { return xs[0]; }
  int64_t k() const { return ks[0]; }
};

}  // namespace jax_intranode
