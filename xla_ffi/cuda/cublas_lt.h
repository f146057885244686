// Matmuls by cuBLASLt, as the collective matmuls need them. The library is the one that JAX's CUDA
// wheels bring, found at run time; its headers come only with a wheel of 400 MB, so the few
// functions that are used are declared in cublas_lt.cc. Errors are thrown as std::runtime_error.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "matmul_call.h"

namespace jax_intranode {

// d[b] = a[b] w for b < batch, all row-major: a[b] is m x k, d[b] is m x n, w is k x n, or n x k
// and `transposed`. bf16 or f16, summed in f32 and rounded once.
struct MatmulShape {
  ElementType type;
  bool transposed;
  int64_t batch, m, n, k;
  int64_t a_stride, d_stride;  // elements from one a[b], one d[b], to the next

  auto operator<=>(const MatmulShape&) const = default;
};

// Version of the library, as in cublasLtGetVersion; 0 if it is not to be found.
size_t CublasLtVersion();

// An algorithm for one shape on one device.
class Matmul {
 public:
  // The one of this process. When it is first asked for, the library's candidates are timed, on a
  // stream and in memory of their own, and the fastest is taken; the library's first one, if there
  // is no memory for that. Candidates that split k among blocks do not come into question. The
  // others differ in their tiles, and nothing says that they all add in the same order; but their
  // results had the same bits wherever that was looked at (docs/measurements/experiments.md).
  static const Matmul& Of(int device, const MatmulShape& shape);

  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Only launches; may be captured. Operands begin at multiples of 16 bytes, as in XLA's buffers.
  void Enqueue(const void* a, const void* w, void* d, void* workspace, cudaStream_t stream) const;

 private:
  Matmul(int device, const MatmulShape& shape);

  struct Descriptors;
  std::unique_ptr<Descriptors> descriptors_;
};

}  // namespace jax_intranode
