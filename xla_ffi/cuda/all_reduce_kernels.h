// The kernels of one element type, as all_reduce.cc sees them. all_reduce.cu is compiled once for
// each type.
#pragma once

#include "all_reduce.h"

namespace jax_intranode {

// The kernel for a group of `size` ranks, and for one buffer or many.
template <ElementType type>
const void* AllReduceKernel(Algorithm algorithm, int size, bool many);

}  // namespace jax_intranode
