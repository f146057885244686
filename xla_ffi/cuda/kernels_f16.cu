#include "collectives.cuh"
#include "norms.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(F16)
JIN_NORM_KERNELS(F16)

}  // namespace jax_intranode
