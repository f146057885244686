#include "collectives.cuh"

namespace jax_intranode {

JIN_COLLECTIVE_KERNELS(BF16)

}  // namespace jax_intranode
