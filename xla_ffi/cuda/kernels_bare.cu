#include "collectives.cuh"

namespace jax_intranode {

const void* BareKernel(Algorithm algorithm, ElementType type, int size, CallKind kind,
                       bool in_segments) {
  return KernelOfCall<AnyBare>(algorithm, type, size, kind, in_segments);
}

const void* BarePermuteKernel(bool aligned) { return PermuteKernel<AnyBare>(aligned); }

}  // namespace jax_intranode
