// Matmuls of few rows, which take as long as reading w does, and their sum over the ranks.
//
// y = x @ w with x [m, k] and w [k, n], row-major, of bf16 or f16. A block has kFewRowsColumns
// columns of w. The blocks of a cluster take turns at chunks of K of the same columns. A block
// reads its chunks by bulk copies, as many at a time as its shared memory holds. At the end the
// blocks of a cluster add their parts of the product in order, in float32, and round once. Who
// multiplies what follows from k and n alone, so a row has the same bits whatever other rows there
// are.
//
// With a sum the kernel sends what it rounds to all ranks, and a second one sums
// (kernels/few_rows.h).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "collectives.h"
#include "matmul_call.h"

namespace jax_intranode {

constexpr int kFewRowsColumns = 64;

struct FewRowsCall {
  ElementType type;  // bf16 or f16
  int64_t m, k, n;
  const void *x, *w;
  void* y;
};

struct FewRowsPlan {
  int split;          // the blocks of a cluster
  int blocks_per_sm;  // whose memory they share
};

// The plan of m rows and a matrix [k, n]. The split depends on k and n alone: see above. Measured
// between 2 H100s (tools/few_rows_probe.cu): clusters take time, which short K don't make up for,
// and clusters of 4 and more don't fill the GPU with one block on each SM.
inline FewRowsPlan FewRowsPlanOf(int64_t m, int64_t k, int64_t n) {
  constexpr int64_t kSms = 132;
  const int64_t tiles = DivideUp(n, kFewRowsColumns), chunks = DivideUp(k, kTileDepth);
  int64_t split = 1;
  if (tiles < 100 && (tiles < 60 || chunks > 48)) split = tiles < 60 ? DivideUp(150, tiles) : 2;
  split = std::min({split, int64_t{8}, chunks});
  return {static_cast<int>(split), split > 2 || split * tiles > kSms || m <= 16 ? 2 : 1};
}

// Enqueues the matmul, and the sum if there is a `group`; may be captured. Throws CUDA's errors.
void LaunchFewRows(const FewRowsCall& call, const FewRowsPlan& plan, const DeviceGroup* group,
                   cudaStream_t stream);

// Loads the kernels onto the current device, if it can run them.
void LoadFewRowsKernels();

}  // namespace jax_intranode
