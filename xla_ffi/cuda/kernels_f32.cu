#include "collectives.cuh"
#include "norms.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(F32)
JIN_NORM_KERNELS(F32)

}  // namespace jax_intranode
