#include "collectives.cuh"
#include "norms.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(BF16)
JIN_NORM_KERNELS(BF16)

}  // namespace jax_intranode
