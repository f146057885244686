// Launches psums and reduce-scatters that add a residual and normalize rows. No XLA, no Python.
#pragma once

#include "../kernels/norm.h"
#include "collectives.h"

namespace jax_intranode {

// The maximum number of threads of a block. A row of kMaxHidden elements takes all of them.
constexpr int kMaxNormThreads = 512;

// The kernel of one element type, which norms.cu defines. It is compiled once for each type.
template <ElementType type>
const void* NormKernel(int size, bool aligned);

// Enqueues one operation: a kernel launch without allocation or synchronisation. May be captured.
cudaError_t LaunchNorm(ElementType type, const DeviceGroup& group, const NormCall& call,
                       LaunchShape shape, cudaStream_t stream);

// Whether blocks of this shape can work on rows of this length.
bool NormFits(ElementType type, const NormCall& call, LaunchShape shape);

// Loads the kernels: see LoadKernels.
cudaError_t LoadNormKernels();

}  // namespace jax_intranode
