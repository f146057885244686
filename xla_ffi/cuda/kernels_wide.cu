#include "collectives.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(F64)
JIN_COLLECTIVE_KERNELS(I64)

}  // namespace jax_intranode
