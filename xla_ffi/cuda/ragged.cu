// The kernels of ragged all-to-alls.
#include "../kernels/ragged.h"
#include "device_thread.h"
#include "launch.h"

namespace jax_intranode {
namespace {

template <class Type>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_ragged(const __grid_constant__ DeviceGroup group,
                         const __grid_constant__ RaggedCall call) {
  __shared__ RaggedTable table;
  DeviceThread thread(group, Algorithm::kRagged);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group);
    return;
  }
  const uint32_t epoch = Begin(thread, group);
  uint32_t step = 0;
  Ragged<CopiedAs<Type>, typename Type::Packets>::Run(thread, group, call, table, epoch, &step);
  End(thread, group, epoch);
}

}  // namespace

const void* RaggedKernel(bool bare) {
  return bare ? kListed<&jax_intranode_ragged<AnyBare>>
              : kListed<&jax_intranode_ragged<AnyFlagged>>;
}

}  // namespace jax_intranode
