// The FFI handlers of all-gather + matmul and matmul + reduce-scatter on CUDA. The attribute
// `algorithm` says which of the two a call is.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_intranode {

XLA_FFI_Error* CudaCollectiveMatmulInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaCollectiveMatmulInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* CudaCollectiveMatmul(XLA_FFI_CallFrame* frame);

}  // namespace jax_intranode
