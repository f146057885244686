// The handlers of all-gather + matmul and matmul + reduce-scatter on GPUs.
#include <algorithm>
#include <exception>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../cuda/fused_matmul.h"
#include "../cuda/pipelined_matmul.h"
#include "../health/call_sites.h"
#include "../kernels/same_operation.h"
#include "collectives_cuda.h"
#include "operands.h"
#include "site.h"

#define JIN_PLAN_MEMBER(name) \
  ::xla::ffi::StructMember<decltype(::jax_intranode::MatmulPlan::name)>(#name)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_intranode::MatmulPlan,
                                      JIN_MATMUL_PLAN_FIELDS(JIN_PLAN_MEMBER));
#undef JIN_PLAN_MEMBER

namespace jax_intranode {
namespace {

// A digest of what the ranks must agree on. Never 0.
uint64_t DigestOf(const MatmulCall& call, const MatmulPlan& plan) {
  uint64_t digest = Fnv1a("");
  const auto add = [&](uint64_t value) { digest = FnvStep(digest, value); };
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

// A collective matmul: by the fused kernel or by the cuBLASLt pipeline, as the plan says.
struct MatmulDeviceSite : Site<DeviceCommunicator> {
  static constexpr char kName[] = "jax_intranode_matmul_device_site";
  inline static ffi::TypeId id = {};
  int64_t axis;     // of x, along which the ranks' operands are joined
  bool transposed;  // matrices are [n, k]
  bool gathered;    // the gathered x is a result
  int wgrads;       // number of weight gradients
  MatmulPlan plan;
  uint32_t number;  // of the call site

  bool gathers() const { return algorithm == Algorithm::kAllGatherMatmul; }

  ffi::Error Read(ffi::Dictionary all);

  // Bytes of scratch that a call needs.
  size_t ScratchBytes(const MatmulCall& call, int size) const {
    return plan.fused() ? FusedScratchBytes(algorithm, call, size, plan)
                        : PipelineScratchBytes(algorithm, call, size);
  }
  // Does what must not be done while a peer waits. Only the call's shapes matter.
  void Prepare(const MatmulMember& member, const MatmulCall& call) const {
    if (!plan.fused()) PreparePipeline(member, algorithm, plan, call);
  }
  // Enqueues the operation; may be captured. Throws CUDA's errors.
  void Enqueue(MatmulMember member, const MatmulCall& call, cudaStream_t stream) const {
    member.group.site = number;
    member.group.operation = OperationWordOfDigest(algorithm, DigestOf(call, plan));
    plan.fused() ? LaunchFused(member, algorithm, plan, call, stream)
                 : EnqueuePipeline(member, algorithm, plan, call, stream);
  }
};

ffi::Error MatmulDeviceSite::Read(ffi::Dictionary all) {
  Attributes attributes(all);
  axis = attributes.Get<int64_t>("axis");
  transposed = attributes.Get<int32_t>("transposed") != 0;
  gathered = attributes.Get<int32_t>("gathered") != 0;
  wgrads = attributes.Get<int32_t>("wgrads");
  plan = attributes.Get<MatmulPlan>("plan");
  if (ffi::Error error = Site::Read(&attributes); error.failure()) return error;
  if ((!gathers() && algorithm != Algorithm::kMatmulReduceScatter) || !IsValid(algorithm, plan) ||
      (gathered && !gathers()) || wgrads < 0 || plan.wgrad != (wgrads > 0) ||
      (wgrads > 0 && (gathered || !transposed))) {
    return Invalid("there is not a collective matmul of algorithm ", algorithm,
                   " with transposed=", transposed, ", gathered=", gathered, ", ", wgrads,
                   " weight gradients and plan ", ToString(plan), ".");
  }
  for (const auto& [device, member] : communicator->members) {
    if (member.matmul) continue;
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        std::string("jax_intranode: this program overlaps ") + OperationName(algorithm) +
            ", for which the devices have no ring here. Run it as it was compiled: with "
            "JAX_INTRANODE_RING_MIB as then, and with cuBLASLt.");
  }
  number = CallSites::Get().Number(text);
  return ffi::Error::Success();
}

// The operands and results of one execution. They are checked again, although lowering has checked
// them: a kernel must not get what it can't handle.
//
// Operands: x and the matrices of an all-gather, or the xs and then the matrices of a
// reduce-scatter, of which only the fused kernel takes several; then wgrad_lhs if there are weight
// gradients. Results: the products, the gathered x if asked for, the weight gradients, scratch.
class CallChecker {
 public:
  CallChecker(const MatmulDeviceSite& site, const MatmulMember& member, MatmulCall* call)
      : site_(site), member_(member), size_(member.group.size), call_(call) {}

  ffi::Error Run(ffi::RemainingArgs args, ffi::RemainingRets rets) {
    if (ffi::Error error = operands_.Read(args, rets); error.failure()) return error;
    for (const auto& check :
         {&CallChecker::CountOperands, &CallChecker::CheckShape, &CallChecker::CheckXs,
          &CallChecker::CheckMatrices, &CallChecker::CheckGathered, &CallChecker::CheckWgrads,
          &CallChecker::CheckMemory}) {
      if (ffi::Error error = (this->*check)(); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

 private:
  template <class... Parts>
  ffi::Error Wrong(const Parts&... parts) const {
    return Invalid(OperationName(site_.algorithm), ": ", parts...);
  }
  static int64_t Elements(const ffi::AnyBuffer& buffer) {
    return static_cast<int64_t>(buffer.element_count());
  }
  // Rows of x, and of a product, on this rank.
  int64_t Rows(bool of_all_ranks) const {
    return call_->outer * call_->rows * (of_all_ranks ? size_ : 1);
  }

  ffi::Error CountOperands() {
    const size_t wgrads = site_.wgrads;
    const size_t factors = in_.size() - std::min(in_.size(), wgrads > 0 ? size_t{1} : 0);
    xs_ = site_.gathers() ? 1 : factors / 2;
    ws_ = factors < xs_ ? 0 : factors - xs_;
    products_ = site_.gathers() ? ws_ : 1;
    const bool fused = site_.plan.fused();
    if (ws_ < 1 || (!site_.gathers() && (ws_ != xs_ || (ws_ > 1 && !fused))) ||
        (fused && ws_ > kMaxMatrices) || wgrads > (site_.gathers() ? 1 : xs_) ||
        (wgrads > 0 && products_ > 1) || out_.size() != products_ + site_.gathered + wgrads + 1) {
      return Wrong(in_.size(), " operands and ", out_.size(), " results.");
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckShape() {
    const ffi::AnyBuffer::Dimensions dims = in_[0].dimensions();
    const int64_t rank = dims.size();
    if (rank < 2 || site_.axis < 0 || site_.axis > rank - 2) {
      return Wrong("axis ", site_.axis, " of ", rank, " dimensions.");
    }
    type_ = in_[0].element_type();
    if (type_ != ffi::BF16 && type_ != ffi::F16) return Wrong("takes bf16 and f16.");
    call_->type = *ElementTypeOf(site_.algorithm, type_);
    call_->transposed = site_.transposed;
    call_->outer = call_->rows = 1;
    for (int64_t d = 0; d < rank - 1; ++d) (d < site_.axis ? call_->outer : call_->rows) *= dims[d];
    if (!site_.gathers()) {
      if (dims[site_.axis] % size_ != 0) {
        return Wrong(dims[site_.axis], " can't be split over ", size_, " ranks.");
      }
      call_->rows /= size_;
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckXs() {
    const int64_t rows = Rows(!site_.gathers());
    for (size_t i = 0; i < xs_; ++i) {
      const ffi::AnyBuffer::Dimensions dims = in_[i].dimensions();
      const int64_t k = dims.size() == in_[0].dimensions().size() ? dims.back() : 0;
      if (in_[i].element_type() != type_ || rows * k == 0 || k % kMatmulDimMultiple != 0 ||
          Elements(in_[i]) != rows * k) {
        return Wrong("x[", i, "] has ", Elements(in_[i]), " elements for ", rows,
                     " rows, and its last dimension is ", k, "; it must be a multiple of ",
                     kMatmulDimMultiple, ".");
      }
      call_->xs.push_back(in_[i].untyped_data());
      call_->ks.push_back(k);
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckMatrices() {
    const int64_t rows = Rows(site_.gathers());
    for (size_t i = 0; i < ws_; ++i) {
      const ffi::AnyBuffer& w = in_[xs_ + i];
      const ffi::AnyBuffer& product = out_[site_.gathers() ? i : 0];
      if (w.dimensions().size() != 2) return Wrong("w is not a matrix.");
      const int64_t k = w.dimensions()[site_.transposed ? 1 : 0];
      const int64_t n = w.dimensions()[site_.transposed ? 0 : 1];
      if (w.element_type() != type_ || product.element_type() != type_ ||
          k != call_->ks[site_.gathers() ? 0 : i] || n == 0 || n % kMatmulDimMultiple != 0 ||
          Elements(product) != rows * n) {
        return Wrong("w[", i, "] is ", k, " x ", n, ", its product has ", Elements(product),
                     " elements for ", rows, " rows.");
      }
      call_->ws.push_back(w.untyped_data());
      if (i < products_) {
        call_->ns.push_back(n);
        call_->products.push_back(product.untyped_data());
      }
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckGathered() {
    if (!site_.gathered) return ffi::Error::Success();
    const ffi::AnyBuffer& gathered = out_[products_];
    if (gathered.element_type() != type_ || Elements(gathered) != Elements(in_[0]) * size_) {
      return Wrong("the gathered x has ", Elements(gathered), " elements.");
    }
    call_->gathered = gathered.untyped_data();
    return ffi::Error::Success();
  }

  ffi::Error CheckWgrads() {
    if (site_.wgrads == 0) return ffi::Error::Success();
    const ffi::AnyBuffer& lhs = in_.back();
    const int64_t n = call_->ns[0], rows = Rows(true);
    if (lhs.element_type() != type_ || lhs.dimensions().size() != in_[0].dimensions().size() ||
        static_cast<int64_t>(lhs.dimensions().back()) != n || Elements(lhs) != rows * n) {
      return Wrong("the left operand of weight gradients has ", Elements(lhs), " elements for ",
                   rows, " rows of ", n, ".");
    }
    call_->wgrad_lhs = lhs.untyped_data();
    for (int i = 0; i < site_.wgrads; ++i) {
      const ffi::AnyBuffer& wgrad = out_[products_ + i];
      if (wgrad.element_type() != type_ || Elements(wgrad) != n * call_->ks[i]) {
        return Wrong("weight gradient ", i, " has ", Elements(wgrad), " elements; it is ", n, " x ",
                     call_->ks[i], ".");
      }
      call_->wgrads.push_back(wgrad.untyped_data());
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckMemory() {
    if (site_.plan.fused()) {
      const size_t needed = FusedRingBytes(site_.algorithm, *call_, size_, site_.plan);
      if (needed > member_.data_bytes()) {
        return Wrong("needs ", needed, " bytes of a ring of ", member_.data_bytes(),
                     "; JAX_INTRANODE_RING_MIB sets its size.");
      }
    }
    const ffi::AnyBuffer& scratch = out_.back();
    call_->scratch = scratch.untyped_data();
    const size_t needed = site_.ScratchBytes(*call_, size_);
    if (scratch.size_bytes() < needed) {
      return Wrong("scratch of ", scratch.size_bytes(), " bytes; it needs ", needed, ".");
    }
    return ffi::Error::Success();
  }

  const MatmulDeviceSite& site_;
  const MatmulMember& member_;
  const int size_;
  MatmulCall* const call_;
  size_t xs_ = 0, ws_ = 0, products_ = 0;  // how many there are
  Operands operands_;
  const std::vector<ffi::AnyBuffer>&in_ = operands_.in, &out_ = operands_.out;
  ffi::DataType type_;
};

// Calls `act(member, call)` with a call that has been checked.
template <class Do>
ffi::Error WithCall(MatmulDeviceSite* site, int32_t device, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, Do&& act) {
  DeviceCommunicator& communicator = *site->communicator;
  if (ffi::Error error = CheckUsable(communicator, device); error.failure()) return error;
  // Every device that CheckUsable lets pass has a member.
  const MatmulMember& member = *communicator.members.at(device).matmul;
  MatmulCall call;
  ffi::Error error = CallChecker(*site, member, &call).Run(args, rets);
  if (error.failure()) return error;
  try {
    act(member, call);
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(failure.what());
  }
  return ffi::Error::Success();
}

// Called at every execution. Only the first call of a site does something. After an error there is
// no execution on this rank. All ranks of a program refuse its wrong call alike, so such a call
// fails alone. When only this rank can't prepare a call, its peers may have launched theirs: then
// its group ends.
ffi::Error Initialize(cudaStream_t stream, int32_t device, MatmulDeviceSite* site,
                      ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  bool right = false;
  ffi::Error error =
      WithCall(site, device, args, rets, [&](const MatmulMember& member, const MatmulCall& call) {
        right = true;
        site->Prepare(member, call);
      });
  return right ? Launched(*site->communicator, device, stream, std::move(error)) : error;
}

// Called eagerly, or while XLA captures a graph, or not at all when a graph is replayed.
ffi::Error ExecuteMatmul(cudaStream_t stream, int32_t device, MatmulDeviceSite* site,
                         ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  device_handler_calls.fetch_add(1, std::memory_order_relaxed);
  ffi::Error error =
      WithCall(site, device, args, rets, [&](const MatmulMember& member, const MatmulCall& call) {
        site->Enqueue(member, call, stream);
      });
  return Launched(*site->communicator, device, stream, std::move(error));
}

}  // namespace

XLA_FFI_Error* CudaCollectiveMatmulInstantiate(XLA_FFI_CallFrame* frame) {
  return InstantiateHandler<MatmulDeviceSite>(frame);
}

XLA_FFI_Error* CudaCollectiveMatmulInitialize(XLA_FFI_CallFrame* frame) {
  static auto* const handler =
      BindCall<MatmulDeviceSite>(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                     .Ctx<ffi::PlatformStream<cudaStream_t>>())
          .To(Initialize)
          .release();
  return handler->Call(frame);
}

XLA_FFI_Error* CudaCollectiveMatmul(XLA_FFI_CallFrame* frame) {
  static auto* const handler =
      BindCall<MatmulDeviceSite>(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
          .To(ExecuteMatmul, {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(frame);
}

}  // namespace jax_intranode
