#include "matmul_site.h"

#include <tuple>

#include "../kernels/same_operation.h"
#include "fused_matmul.h"
#include "pipelined_matmul.h"

namespace jax_intranode {
namespace {

// A digest of what the ranks must agree on. Never 0.
uint64_t DigestOf(const MatmulCall& call, const MatmulPlan& plan) {
  uint64_t digest = 0xCBF29CE484222325;  // FNV-1a
  const auto add = [&](uint64_t value) { digest = (digest ^ value) * 0x100000001B3; };
  for (const uint64_t value :
       {static_cast<uint64_t>(call.type), static_cast<uint64_t>(call.transposed),
        static_cast<uint64_t>(call.outer), static_cast<uint64_t>(call.rows),
        static_cast<uint64_t>(call.gathered != nullptr), uint64_t{call.wgrads.size()}}) {
    add(value);
  }
  for (const int64_t k : call.ks) add(k);
  for (const int64_t n : call.ns) add(n);
  std::apply([&](const auto&... field) { (add(plan.*field.member), ...); }, kPlanFields);
  return digest >> 1 | 1;
}

}  // namespace

size_t MatmulSite::ScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                                const MatmulPlan& plan) {
  return plan.fused() ? FusedScratchBytes(algorithm, call, size, plan)
                      : PipelineScratchBytes(algorithm, call, size);
}

void MatmulSite::Prepare(const MatmulCall& call) const {
  if (!plan_.fused()) PreparePipeline(member_, algorithm_, plan_, call);
}

void MatmulSite::Enqueue(const MatmulCall& call, cudaStream_t stream) const {
  MatmulMember member = member_;
  member.group.operation = OperationWordOfDigest(algorithm_, DigestOf(call, plan_));
  plan_.fused() ? LaunchFused(member, algorithm_, plan_, call, stream)
                : EnqueuePipeline(member, algorithm_, plan_, call, stream);
}

}  // namespace jax_intranode
