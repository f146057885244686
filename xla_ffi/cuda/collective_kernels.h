// The kernels of one element type, as collectives.cc sees them. collectives.cu is compiled once for
// each type.
#pragma once

#include "collectives.h"

namespace jax_intranode {

// What a kernel is called with: AlignedBuffer, Buffer or Buffers.
enum class CallKind { kAligned, kAny, kMany };

// The kernel for a group of `size` ranks; none if there is no such kernel.
template <ElementType type>
const void* CollectiveKernel(Algorithm algorithm, int size, CallKind kind);

}  // namespace jax_intranode
