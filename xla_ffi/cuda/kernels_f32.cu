#include "collectives.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(F32)

}  // namespace jax_intranode
