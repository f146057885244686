#include "collectives.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(I8)
JIN_COLLECTIVE_KERNELS(I32)

}  // namespace jax_intranode
