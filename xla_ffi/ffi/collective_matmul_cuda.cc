#include "collective_matmul_cuda.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "../cuda/collective_matmul.h"
#include "../cuda/fused_matmul.h"
#include "collectives_cuda.h"

#define JIN_PLAN_MEMBER(name) \
  ::xla::ffi::StructMember<decltype(::jax_intranode::MatmulPlan::name)>(#name)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_intranode::MatmulPlan,
                                      JIN_MATMUL_PLAN_FIELDS(JIN_PLAN_MEMBER));
#undef JIN_PLAN_MEMBER

namespace jax_intranode {
namespace {

// What instantiate leaves: the matmuls of each device of this process.
struct MatmulDeviceSite {
  static ffi::TypeId id;
  std::shared_ptr<DeviceCommunicator> communicator;
  Algorithm algorithm;
  int64_t axis;
  bool transposed;
  bool gathered;
  int wgrads;  // number of weight gradients
  MatmulPlan plan;
  std::vector<std::unique_ptr<MatmulSite>> sites;  // by CUDA device ordinal
};
ffi::TypeId MatmulDeviceSite::id = {};

ffi::Error Invalid(const MatmulDeviceSite& site, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string("jax_intranode: ") +
                                     OperationName(site.algorithm) + ": " + what);
}

ffi::ErrorOr<std::unique_ptr<MatmulDeviceSite>> Instantiate(ffi::Span<const int64_t> device_ids,
                                                            int64_t group_size, int32_t algorithm,
                                                            int64_t axis, int32_t transposed,
                                                            int32_t gathered, int32_t wgrads,
                                                            MatmulPlan plan) {
  const Partition partition{{device_ids.begin(), device_ids.end()}, group_size};
  auto site = std::make_unique<MatmulDeviceSite>();
  site->communicator = Registry<DeviceCommunicator>::Get().Find(partition);
  if (!site->communicator) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, NoCommunicator(partition)));
  }
  site->algorithm = static_cast<Algorithm>(algorithm);
  site->axis = axis;
  site->transposed = transposed != 0;
  site->gathered = gathered != 0;
  site->wgrads = wgrads;
  site->plan = plan;
  const bool gathers = site->algorithm == Algorithm::kAllGatherMatmul;
  if ((!gathers && site->algorithm != Algorithm::kMatmulReduceScatter) ||
      !IsValid(site->algorithm, plan) || (site->gathered && !gathers) || wgrads < 0 ||
      plan.wgrad != (wgrads > 0) || (wgrads > 0 && (site->gathered || !site->transposed))) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax_intranode: there is no collective matmul of algorithm " + std::to_string(algorithm) +
        " with transposed=" + std::to_string(transposed) +
        ", gathered=" + std::to_string(gathered) + ", " + std::to_string(wgrads) +
        " weight gradients and plan " + ToString(plan) + "."));
  }
  if (site->communicator->matmul_members.empty()) {
    return ffi::Unexpected(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        std::string("jax_intranode: this program overlaps ") + OperationName(site->algorithm) +
            ", for which the devices have no ring here. Run it as it was compiled: with "
            "JAX_INTRANODE_RING_MIB as then, and with cuBLASLt."));
  }
  for (const std::optional<MatmulMember>& member : site->communicator->matmul_members) {
    site->sites.push_back(
        member ? std::make_unique<MatmulSite>(*member, site->algorithm, site->plan) : nullptr);
  }
  return {std::move(site)};
}

// Fills in a call. Refuses what must not reach a kernel; lowering has checked all of it before.
ffi::Error CollectCall(const MatmulDeviceSite& site, const MatmulMember& member,
                       ffi::RemainingArgs args, ffi::RemainingRets rets, MatmulCall* call) {
  const int size = member.group.size;
  const bool gathers = site.algorithm == Algorithm::kAllGatherMatmul;
  // x and matrices, or as many xs as matrices, of which a kernel only takes several; and what
  // derivatives are products with.
  const size_t besides = site.wgrads,
               factors = args.size() - std::min(args.size(), besides > 0 ? size_t{1} : 0);
  const size_t xs = gathers ? 1 : factors / 2;
  const size_t ws = factors < xs ? 0 : factors - xs;
  const size_t products = gathers ? ws : 1;
  if (ws < 1 || (!gathers && (ws != xs || (ws > 1 && !site.plan.fused()))) ||
      (site.plan.fused() && ws > kMaxMatrices) || besides > (gathers ? 1 : xs) ||
      (besides > 0 && products > 1) || rets.size() != products + site.gathered + besides + 1) {
    return Invalid(site, std::to_string(args.size()) + " operands and " +
                             std::to_string(rets.size()) + " results.");
  }
  std::vector<ffi::AnyBuffer> in;
  std::vector<ffi::AnyBuffer> out;
  for (size_t i = 0; i < args.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return std::move(buffer.error());
    in.push_back(*buffer);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return std::move(buffer.error());
    out.push_back(**buffer);
  }
  const ffi::AnyBuffer::Dimensions dims = in[0].dimensions();
  const int64_t rank = dims.size();
  if (rank < 2 || site.axis < 0 || site.axis > rank - 2) {
    return Invalid(
        site, "axis " + std::to_string(site.axis) + " of " + std::to_string(rank) + " dimensions.");
  }
  const ffi::DataType type = in[0].element_type();
  if (type != ffi::BF16 && type != ffi::F16) return Invalid(site, "takes bf16 and f16.");
  call->type = *ElementTypeOf(type);
  call->transposed = site.transposed;
  call->outer = call->rows = 1;
  for (int64_t d = 0; d < rank - 1; ++d) (d < site.axis ? call->outer : call->rows) *= dims[d];
  if (!gathers) {
    if (dims[site.axis] % size != 0) {
      return Invalid(site, std::to_string(dims[site.axis]) + " can't be split over " +
                               std::to_string(size) + " ranks.");
    }
    call->rows /= size;
  }
  const int64_t rows = call->outer * call->rows * (gathers ? 1 : size);
  for (size_t i = 0; i < xs; ++i) {
    const ffi::AnyBuffer::Dimensions of_x = in[i].dimensions();
    const int64_t k = of_x.size() == dims.size() ? of_x.back() : 0;
    if (in[i].element_type() != type || rows * k == 0 || k % 8 != 0 ||
        static_cast<int64_t>(in[i].element_count()) != rows * k) {
      return Invalid(site, "x[" + std::to_string(i) + "] has " +
                               std::to_string(in[i].element_count()) + " elements for " +
                               std::to_string(rows) + " rows, and its last dimension is " +
                               std::to_string(k) + "; it takes multiples of 8.");
    }
    call->xs.push_back(in[i].untyped_data());
    call->ks.push_back(k);
  }
  for (size_t i = 0; i < ws; ++i) {
    const ffi::AnyBuffer& w = in[xs + i];
    const ffi::AnyBuffer& product = out[gathers ? i : 0];
    if (w.dimensions().size() != 2) return Invalid(site, "w is no matrix.");
    const int64_t k = w.dimensions()[site.transposed ? 1 : 0];
    const int64_t n = w.dimensions()[site.transposed ? 0 : 1];
    const int64_t rows_of_product = call->outer * call->rows * (gathers ? size : 1);
    if (w.element_type() != type || product.element_type() != type ||
        k != call->ks[gathers ? 0 : i] || n == 0 || n % 8 != 0 ||
        static_cast<int64_t>(product.element_count()) != rows_of_product * n) {
      return Invalid(site, "w[" + std::to_string(i) + "] is " + std::to_string(k) + " x " +
                               std::to_string(n) + ", its product has " +
                               std::to_string(product.element_count()) + " elements for " +
                               std::to_string(rows_of_product) + " rows.");
    }
    call->ws.push_back(w.untyped_data());
    if (i < products) {
      call->ns.push_back(n);
      call->products.push_back(product.untyped_data());
    }
  }
  if (site.gathered) {
    const ffi::AnyBuffer& gathered = out[products];
    if (gathered.element_type() != type ||
        gathered.element_count() != in[0].element_count() * size) {
      return Invalid(
          site, "the gathered x has " + std::to_string(gathered.element_count()) + " elements.");
    }
    call->gathered = gathered.untyped_data();
  }
  if (besides > 0) {
    const ffi::AnyBuffer& beside = in.back();
    const int64_t all_rows = call->outer * call->rows * size;
    call->beside = beside.untyped_data();
    if (beside.element_type() != type || beside.dimensions().size() != dims.size() ||
        static_cast<int64_t>(beside.dimensions().back()) != call->ns[0] ||
        static_cast<int64_t>(beside.element_count()) != all_rows * call->ns[0]) {
      return Invalid(site, "what derivatives are products with has " +
                               std::to_string(beside.element_count()) + " elements for " +
                               std::to_string(all_rows) + " rows of " +
                               std::to_string(call->ns[0]) + ".");
    }
    for (size_t i = 0; i < besides; ++i) {
      const ffi::AnyBuffer& derivative = out[products + i];
      if (derivative.element_type() != type ||
          static_cast<int64_t>(derivative.element_count()) != call->ns[0] * call->ks[i]) {
        return Invalid(site, "derivative " + std::to_string(i) + " has " +
                                 std::to_string(derivative.element_count()) + " elements; it is " +
                                 std::to_string(call->ns[0]) + " x " + std::to_string(call->ks[i]) +
                                 ".");
      }
      call->derivatives.push_back(derivative.untyped_data());
    }
  }
  if (site.plan.fused()) {
    const size_t needed = FusedRingBytes(site.algorithm, *call, size, site.plan);
    if (needed > member.data_bytes()) {
      return Invalid(site, "takes " + std::to_string(needed) + " bytes of a ring of " +
                               std::to_string(member.data_bytes()) +
                               "; JAX_INTRANODE_RING_MIB sets its size.");
    }
  }
  const ffi::AnyBuffer& scratch = out.back();
  call->scratch = scratch.untyped_data();
  const size_t needed = ScratchBytes(site.algorithm, *call, size, site.plan);
  if (scratch.size_bytes() < needed) {
    return Invalid(site, "scratch of " + std::to_string(scratch.size_bytes()) +
                             " bytes; it takes " + std::to_string(needed) + ".");
  }
  return ffi::Error::Success();
}

template <class Do>
ffi::Error WithCall(MatmulDeviceSite* site, int32_t device, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, Do&& act) {
  const DeviceCommunicator& communicator = *site->communicator;
  if (ffi::Error error = CheckUsable(communicator, device); error.failure()) return error;
  MatmulCall call;
  ffi::Error error =
      CollectCall(*site, *communicator.matmul_members[device], args, rets, &call);  // all have one
  if (error.failure()) return error;
  try {
    act(*site->sites[device], call);  // all members have one
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(failure.what());
  }
  return ffi::Error::Success();
}

// At every execution; does something only at the first.
ffi::Error Initialize(int32_t device, MatmulDeviceSite* site, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, ffi::Dictionary) {
  return WithCall(site, device, args, rets,
                  [](MatmulSite& of_device, const MatmulCall& call) { of_device.Prepare(call); });
}

// Called eagerly, or while XLA captures a graph, or not at all when a graph is replayed.
ffi::Error Execute(cudaStream_t stream, int32_t device, MatmulDeviceSite* site,
                   ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  device_handler_calls.fetch_add(1, std::memory_order_relaxed);
  return WithCall(site, device, args, rets, [&](MatmulSite& of_device, const MatmulCall& call) {
    try {
      of_device.Enqueue(call, stream);
    } catch (const std::exception& failure) {
      // The peers have been sent a part: nothing that follows would be in step.
      site->communicator->set_failure(failure.what());
      throw;
    }
  });
}

}  // namespace

XLA_FFI_Error* CudaCollectiveMatmulInstantiate(XLA_FFI_CallFrame* frame) {
  RegisterStateType<MatmulDeviceSite>(frame->api, "jax_intranode_matmul_device_site");
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate,
                         ffi::Ffi::BindInstantiate()
                             .Attr<ffi::Span<const int64_t>>("device_ids")
                             .Attr<int64_t>("group_size")
                             .Attr<int32_t>("algorithm")
                             .Attr<int64_t>("axis")
                             .Attr<int32_t>("transposed")
                             .Attr<int32_t>("gathered")
                             .Attr<int32_t>("wgrads")
                             .Attr<MatmulPlan>("plan"));
  return (*handler)(frame);
}

XLA_FFI_Error* CudaCollectiveMatmulInitialize(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Initialize,
                         ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::State<MatmulDeviceSite>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs());
  return (*handler)(frame);
}

XLA_FFI_Error* CudaCollectiveMatmul(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Execute,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::State<MatmulDeviceSite>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs(),
                         {ffi::Traits::kCmdBufferCompatible});
  return (*handler)(frame);
}

}  // namespace jax_intranode
