// The layout of a dispatch on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "../kernels/experts_call.h"

namespace jax_intranode {

// Enqueues the computation of who goes where; it communicates with nobody.
cudaError_t LaunchLayout(const LayoutCall& call, cudaStream_t stream);

}  // namespace jax_intranode
