// The fused kernels, which fused_*.cu define, as their launch finds them.
#pragma once

#include <cstddef>

#include "../kernels/algorithms.h"

namespace jax_intranode {

struct FusedKernel {
  const void* function;
  size_t shared_bytes;
};

// The kernel of an element type for a call; HasFusedKernel says which there are.
template <ElementType type>
FusedKernel FusedKernelFor(bool transposed, bool wgrad, int columns);

}  // namespace jax_intranode
