// The handler of matmuls of few rows on GPUs.
#include <exception>
#include <utility>

#include "../cuda/few_rows.h"
#include "../health/call_sites.h"
#include "collectives_cuda.h"
#include "operands.h"
#include "site.h"

namespace jax_intranode {
namespace {

struct FewRowsSite : Site<DeviceCommunicator> {
  static constexpr char kName[] = "jax_intranode_few_rows_site";
  inline static ffi::TypeId id = {};
  bool sums;        // over the ranks
  uint32_t number;  // of the call site

  ffi::Error Read(ffi::Dictionary all) {
    Attributes attributes(all);
    sums = attributes.Get<int32_t>("sums") != 0;
    if (ffi::Error error = Site::Read(&attributes); error.failure()) return error;
    if (algorithm != Algorithm::kFewRows) {
      return Invalid(AlgorithmName(algorithm), " is no matmul of few rows.");
    }
    number = CallSites::Get().Number(text);
    return ffi::Error::Success();
  }
};

// Operands: x [..., k] and w [k, n]. Result: y [..., n]. Refuses what must not reach a kernel,
// though lowering lets none of it pass.
ffi::Error Collect(const FewRowsSite& site, const DeviceGroup& group, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, FewRowsCall* call) {
  Operands operands;
  if (ffi::Error error = operands.Read(args, rets); error.failure()) return error;
  const auto& [in, out] = operands;
  if (in.size() != 2 || out.size() != 1) {
    return Invalid("a matmul of few rows got ", in.size(), " operands and ", out.size(),
                   " results; it takes 2 and returns 1.");
  }
  const ffi::AnyBuffer &x = in[0], &w = in[1], &y = out[0];
  const ffi::DataType type = x.element_type();
  const bool has_matrix = w.dimensions().size() == 2;
  const int64_t k = has_matrix ? w.dimensions()[0] : 0, n = has_matrix ? w.dimensions()[1] : 0;
  const int64_t m = k > 0 ? static_cast<int64_t>(x.element_count()) / k : 0;
  const auto aligned = [](const ffi::AnyBuffer& buffer) {
    return reinterpret_cast<uintptr_t>(buffer.untyped_data()) % sizeof(Pack) == 0;
  };
  if ((type != ffi::BF16 && type != ffi::F16) || w.element_type() != type ||
      y.element_type() != type || x.dimensions().size() < 2 || x.dimensions().back() != k ||
      !FewRowsFit(m, k, n) || static_cast<int64_t>(y.element_count()) != m * n || !aligned(x) ||
      !aligned(w) || !aligned(y)) {
    return Invalid("a matmul of few rows can't multiply ", m, " rows of ", k,
                   " elements with a matrix of ", n, " columns, or not at their addresses.");
  }
  call->type = *ElementTypeOf(site.algorithm, type);
  call->m = m;
  call->k = k;
  call->n = n;
  call->x = x.untyped_data();
  call->w = w.untyped_data();
  call->y = y.untyped_data();
  const size_t needed =
      EpochBufferBytesNeeded(site.algorithm, call->type, PacksOf(y.size_bytes()), group.size);
  if (site.sums && needed > group.epoch_buffer_bytes) {
    return Invalid("a sum of ", y.size_bytes(), " bytes takes ", needed,
                   " bytes of each buffer of the slab, which has ", group.epoch_buffer_bytes,
                   ". Was the program compiled with another JAX_INTRANODE_SLAB_MIB? Compile it "
                   "again.");
  }
  return ffi::Error::Success();
}

ffi::Error LaunchCall(cudaStream_t stream, const FewRowsSite& site, DeviceGroup group,
                      ffi::RemainingArgs args, ffi::RemainingRets rets) {
  FewRowsCall call;
  if (ffi::Error error = Collect(site, group, args, rets, &call); error.failure()) return error;
  group.site = site.number;
  try {
    LaunchFewRows(call, FewRowsPlanOf(call.m, call.k, call.n), site.sums ? &group : nullptr,
                  stream);
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(failure.what());
  }
  return ffi::Error::Success();
}

// XLA calls it eagerly or while it captures a graph, and not at all when it replays a graph. After
// an error of a matmul without a sum no peer has made a call that this rank has not made.
ffi::Error ExecuteFewRows(cudaStream_t stream, int32_t device, FewRowsSite* site,
                          ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  DeviceCommunicator& communicator = *site->communicator;
  if (site->sums) device_handler_calls.fetch_add(1, std::memory_order_relaxed);
  ffi::Error error = CheckUsable(communicator, device);
  if (error.success()) {
    error = LaunchCall(stream, *site, communicator.members.at(device).group, args, rets);
  }
  return site->sums ? Launched(communicator, device, stream, std::move(error)) : error;
}

}  // namespace

XLA_FFI_Error* CudaFewRowsInstantiate(XLA_FFI_CallFrame* frame) {
  return InstantiateHandler<FewRowsSite>(frame);
}

XLA_FFI_Error* CudaFewRows(XLA_FFI_CallFrame* frame) {
  static auto* const handler =
      BindCall<FewRowsSite>(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
          .To(ExecuteFewRows, {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(frame);
}

}  // namespace jax_intranode
