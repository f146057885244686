// The handler of the layout of a mixture of experts on GPUs. Dispatch and combine are collectives.
#include "../cuda/experts.h"
#include "collectives_cuda.h"
#include "operands.h"
#include "site.h"

namespace jax_intranode {
namespace {

struct LayoutSite : Site<DeviceCommunicator> {
  static constexpr char kName[] = "jax_intranode_layout_site";
  inline static ffi::TypeId id = {};
  ffi::Error Read(ffi::Dictionary all) {
    Attributes attributes(all);
    capacity = attributes.Get<int64_t>("capacity");
    return Site::Read(&attributes);
  }
  int64_t capacity;
};

// Operand: ids and weights [ranks, 2, tokens, choices]. Results: places, ranks, sizes, used,
// dropped. Refuses what must not reach a kernel, though lowering lets none of it pass.
ffi::Error Collect(const LayoutSite& site, const DeviceGroup& group, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, LayoutCall* call) {
  Operands operands;
  if (ffi::Error error = operands.Read(args, rets); error.failure()) return error;
  const auto& [in, out] = operands;
  if (in.size() != 1 || out.size() != 5 || in[0].dimensions().size() != 4) {
    return Invalid("a layout got ", in.size(), " operands and ", out.size(),
                   " results; it takes one of 4 dimensions, and returns 5.");
  }
  const auto shape = in[0].dimensions();
  const auto count = [&out = operands.out](size_t i) { return out[i].element_count(); };
  bool fits = in[0].element_type() == ffi::S32 && shape[0] == group.size && shape[1] == 2 &&
              shape[2] > 0 && shape[3] > 0 && in[0].element_count() <= INT32_MAX &&
              site.capacity > 0 && site.capacity <= INT32_MAX &&
              2 * count(0) == in[0].element_count() && count(1) == static_cast<size_t>(shape[2]) &&
              count(2) > 0 && count(2) < 65535 && count(3) == 1 &&
              count(4) == static_cast<size_t>(group.size);
  for (const ffi::AnyBuffer& result : out) fits = fits && result.element_type() == ffi::S32;
  if (!fits) {
    return Invalid("a layout of ", count(0), " choices of ", count(2), " experts does not fit ",
                   group.size, " ranks.");
  }
  const auto data = [&out = operands.out](size_t i) {
    return static_cast<int32_t*>(out[i].untyped_data());
  };
  *call = {.gathered = static_cast<const int32_t*>(in[0].untyped_data()),
           .places = data(0),
           .ranks = data(1),
           .sizes = data(2),
           .used = data(3),
           .dropped = data(4),
           .rank = static_cast<uint32_t>(group.rank),
           .size = static_cast<uint32_t>(group.size),
           .tokens = static_cast<uint32_t>(shape[2]),
           .choices = static_cast<uint32_t>(shape[3]),
           .experts = static_cast<uint32_t>(count(2)),
           .capacity = static_cast<uint32_t>(site.capacity)};
  return ffi::Error::Success();
}

ffi::Error ExecuteLayout(cudaStream_t stream, int32_t device, LayoutSite* site,
                         ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  DeviceCommunicator& communicator = *site->communicator;
  if (ffi::Error error = CheckUsable(communicator, device); error.failure()) return error;
  LayoutCall call;
  ffi::Error error = Collect(*site, communicator.members.at(device).group, args, rets, &call);
  if (error.failure()) return error;
  const cudaError_t status = LaunchLayout(call, stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return Internal("launching a layout on CUDA device ", device,
                  " failed: ", cudaGetErrorString(status));
}

}  // namespace

XLA_FFI_Error* CudaLayoutInstantiate(XLA_FFI_CallFrame* frame) {
  return InstantiateHandler<LayoutSite>(frame);
}

XLA_FFI_Error* CudaLayout(XLA_FFI_CallFrame* frame) {
  static auto* const handler =
      BindCall<LayoutSite>(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
          .To(ExecuteLayout, {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(frame);
}

}  // namespace jax_intranode
