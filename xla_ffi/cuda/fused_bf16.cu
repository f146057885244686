#include "fused_kernel.cuh"

namespace jax_intranode {

JIN_FUSED_KERNELS(BF16)

}  // namespace jax_intranode
