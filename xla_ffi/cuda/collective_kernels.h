// The kernels of one element type, as collectives.cc sees them. collectives.cu is compiled once for
// each type.
#pragma once

#include "collectives.h"

namespace jax_intranode {

// The kernel for a group of `size` ranks, and for one buffer or many.
template <ElementType type>
const void* CollectiveKernel(Algorithm algorithm, int size, bool many);

}  // namespace jax_intranode
