#include "collectives.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(F16)

}  // namespace jax_intranode
