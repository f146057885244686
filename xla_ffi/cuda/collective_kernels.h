// The kernels of one element type, which collectives.cu defines. It is compiled once for each type.
#pragma once

#include "collectives.h"

namespace jax_intranode {

// The buffers that a kernel takes: AlignedBuffer, Buffer or Buffers.
enum class CallKind { kAligned, kAny, kMany };

// The kernel for a group of `size` ranks; null if there is none. `in_segments`: it takes the
// buffers as InSegments (segments.h).
template <ElementType type>
const void* CollectiveKernel(Algorithm algorithm, int size, CallKind kind, bool in_segments);

}  // namespace jax_intranode
