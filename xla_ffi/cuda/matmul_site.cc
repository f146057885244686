#include "matmul_site.h"

#include "fused_matmul.h"
#include "pipelined_matmul.h"

namespace jax_intranode {

size_t MatmulSite::ScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                                const MatmulPlan& plan) {
  return plan.fused() ? FusedScratchBytes(algorithm, call, size, plan)
                      : PipelineScratchBytes(algorithm, call, size);
}

void MatmulSite::Prepare(const MatmulCall& call) const {
  if (!plan_.fused()) PreparePipeline(member_, algorithm_, plan_, call);
}

void MatmulSite::Enqueue(const MatmulCall& call, cudaStream_t stream) const {
  plan_.fused() ? LaunchFused(member_, algorithm_, plan_, call, stream)
                : EnqueuePipeline(member_, algorithm_, plan_, call, stream);
}

}  // namespace jax_intranode
