// The kernels of ragged all-to-alls.
#include "../kernels/ragged.h"
#include "device_thread.h"
#include "launch.h"

namespace jax_intranode {
namespace {

template <class Type, int N, uint32_t K>
__global__ void __launch_bounds__(kMaxThreads, 2)
    jax_intranode_ragged(const __grid_constant__ DeviceGroup group,
                         const __grid_constant__ RaggedCall call) {
  __shared__ RaggedTableOf<K == 0 ? kMaxUpdates : N * K> table;
  DeviceThread thread(group, Algorithm::kRagged);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group);
    return;
  }
  const uint32_t epoch = Begin(thread, group);
  uint32_t step = 0;
  Ragged<CopiedAs<Type>, typename Type::Packets, N, K>::Run(thread, group, call, table, epoch,
                                                            &step);
  End(thread, group, epoch);
}

}  // namespace

// Between two ranks a call of one update for each has a kernel of its own.
const void* RaggedKernel(bool bare, bool one_of_two) {
  if (one_of_two) {
    return bare ? kListed<&jax_intranode_ragged<AnyBare, 2, 1>>
                : kListed<&jax_intranode_ragged<AnyFlagged, 2, 1>>;
  }
  return bare ? kListed<&jax_intranode_ragged<AnyBare, 0, 0>>
              : kListed<&jax_intranode_ragged<AnyFlagged, 0, 0>>;
}

}  // namespace jax_intranode
