#include "collectives.cuh"

namespace jax_intranode {

const void* FlaggedKernel(Algorithm algorithm, ElementType type, int size, CallKind kind,
                          bool in_segments) {
  return KernelOfCall<AnyFlagged>(algorithm, type, size, kind, in_segments);
}

const void* FlaggedPermuteKernel(bool aligned) { return PermuteKernel<AnyFlagged>(aligned); }

}  // namespace jax_intranode
