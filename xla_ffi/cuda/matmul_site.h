// The collective matmul of a call site on one device: by the fused kernel or by the cuBLASLt
// pipeline, as the plan says. No XLA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "matmul_call.h"

namespace jax_intranode {

class MatmulSite {
 public:
  // `number` is that of the call site, for failure records.
  MatmulSite(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
             uint32_t number)
      : member_(member), algorithm_(algorithm), plan_(plan) {
    member_.group.site = number;
  }

  // Bytes of scratch that a call needs.
  static size_t ScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                             const MatmulPlan& plan);

  // Does what must not be done while a peer waits. Only the call's shapes matter.
  void Prepare(const MatmulCall& call) const;
  // Enqueues the operation; may be captured. Throws CUDA's errors.
  void Enqueue(const MatmulCall& call, cudaStream_t stream) const;

 private:
  MatmulMember member_;
  const Algorithm algorithm_;
  const MatmulPlan plan_;
};

}  // namespace jax_intranode
