// Matmuls by cuBLASLt for the collective matmuls. The library is found at run time: it comes with
// JAX's CUDA wheels. Its headers come only with a wheel of 400 MB, so cublas_lt.cc declares the few
// functions that it uses. Errors are thrown as std::runtime_error.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "matmul_call.h"

namespace jax_intranode {

// d[b] = a[b] @ w for b < batch. All are row-major: a[b] is [m, k], d[b] is [m, n], w is [k, n], or
// [n, k] if `transposed`. bf16 or f16, accumulated in f32 and rounded once.
struct MatmulShape {
  ElementType type;
  bool transposed;
  int64_t batch, m, n, k;
  int64_t a_stride, d_stride;  // elements from one a[b], one d[b], to the next

  auto operator<=>(const MatmulShape&) const = default;
};

// The library's version as cublasLtGetVersion returns it; 0 if there is no library.
size_t CublasLtVersion();

// The matmul of one shape on one device, with the algorithm chosen for it.
class Matmul {
 public:
  // The process's matmul of this shape. The first call times the library's candidates, on a stream
  // and in memory of its own, and takes the fastest; or the library's first candidate if there is
  // no memory for timing. Candidates that split K among blocks are excluded. The others differ in
  // their tiles. The library does not promise that all of them add in the same order, but their
  // results were bit-identical wherever we compared them (docs/measurements/experiments.md).
  static const Matmul& Of(int device, const MatmulShape& shape);

  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Launches the matmul; may be captured. Operands are aligned to 16 bytes, as XLA's buffers are.
  void Enqueue(const void* a, const void* w, void* d, void* workspace, cudaStream_t stream) const;

 private:
  Matmul(int device, const MatmulShape& shape);

  struct Descriptors;
  std::unique_ptr<Descriptors> descriptors_;
};

}  // namespace jax_intranode
