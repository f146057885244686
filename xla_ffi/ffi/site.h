// A call site as its HLO describes it: read and checked once, when a program is loaded. All
// platforms share it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "../health/call_sites.h"
#include "../kernels/algorithms.h"
#include "../text.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_intranode {

namespace ffi = ::xla::ffi;

// The error of a call that is wrong, or that can't run, with a text of these parts.
template <class... Parts>
ffi::Error Invalid(const Parts&... parts) {
  return ffi::Error::InvalidArgument(Join("jax_intranode: ", parts...));
}
template <class... Parts>
ffi::Error Internal(const Parts&... parts) {
  return ffi::Error::Internal(Join("jax_intranode: ", parts...));
}

// Reads attributes by their names, and remembers the first error.
class Attributes {
 public:
  explicit Attributes(ffi::Dictionary all) : all_(all) {}

  template <class T>
  T Get(std::string_view name) {
    ffi::ErrorOr<T> value = all_.get<T>(name);
    if (value.has_value()) return *value;
    if (error_.success()) error_ = std::move(value.error());
    return T{};
  }
  // An attribute that some calls don't have.
  template <class T>
  T GetOr(std::string_view name, T otherwise) {
    return all_.contains(name) ? Get<T>(name) : otherwise;
  }
  ffi::Error TakeError() { return std::move(error_); }

 private:
  const ffi::Dictionary all_;
  ffi::Error error_ = ffi::Error::Success();
};

// What every site has: its groups, its algorithm, and its text (health/call_sites.h).
template <class Communicator>
struct Site {
  std::shared_ptr<Communicator> communicator;
  Partition partition;
  Algorithm algorithm;
  std::string text;

  ffi::Error Read(Attributes* attributes) {
    const auto device_ids = attributes->Get<ffi::Span<const int64_t>>("device_ids");
    algorithm = static_cast<Algorithm>(attributes->Get<int32_t>("algorithm"));
    partition = {{device_ids.begin(), device_ids.end()},
                 attributes->Get<int64_t>("group_size"),
                 HasOwnRegion(algorithm)};
    text = attributes->Get<std::string_view>("site");
    if (ffi::Error error = attributes->TakeError(); error.failure()) return error;
    if (!IsKnown(algorithm)) {
      return Invalid(
          "there is no algorithm ", algorithm,
          ". Was the program compiled by another version of this package? Compile it again.");
    }
    if (const auto& [ids, size, permutes] = partition; size < 1 || ids.size() % size != 0) {
      return Invalid(ids.size(), " devices can't be groups of ", size, ".");
    }
    communicator = Registry<Communicator>::Get().Find(partition);
    if (communicator) return ffi::Error::Success();
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "jax_intranode: there is no communicator for the device groups " + ToString(partition) +
            ". A program that was compiled elsewhere needs jax_intranode.initialize(mesh), with "
            "the mesh that it was compiled for, before it is loaded.");
  }
};

// Whether each `size` numbers are a partial permutation: ranks or -1, and no rank twice.
inline bool ArePermutations(const std::vector<int>& sources, int size) {
  if (sources.empty() || size < 1 || sources.size() % size != 0) return false;
  for (size_t first = 0; first < sources.size(); first += size) {
    uint64_t seen = 0;
    for (int r = 0; r < size; ++r) {
      const int source = sources[first + r];
      if (source < -1 || source >= size || (source >= 0 && (seen >> source & 1) != 0)) return false;
      if (source >= 0) seen |= uint64_t{1} << source;
    }
  }
  return true;
}

// A collective or a norm.
template <class Communicator>
struct CollectiveSite : Site<Communicator> {
  uint32_t segments;
  int blocks, threads;        // on GPUs
  float eps, weight_offset;   // of a norm
  std::vector<int> sources;   // of a permute: for each member, the source of each rank, or -1
  uint64_t permutations = 0;  // a hash of them

  ffi::Error Read(ffi::Dictionary all) {
    Attributes attributes(all);
    segments = attributes.Get<int32_t>("segments");
    blocks = attributes.GetOr<int32_t>("blocks", 0);
    threads = attributes.GetOr<int32_t>("threads", 0);
    eps = attributes.GetOr<float>("eps", 0);
    weight_offset = attributes.GetOr<float>("weight_offset", 0);
    const auto of_ranks = attributes.GetOr<ffi::Span<const int64_t>>("sources", {});
    if (ffi::Error error = Site<Communicator>::Read(&attributes); error.failure()) return error;
    if (this->algorithm == Algorithm::kPermute) {
      sources.assign(of_ranks.begin(), of_ranks.end());
      for (const int source : sources) permutations = FnvStep(permutations, source + 2);
      const int size = static_cast<int>(this->partition.size);
      if (!ArePermutations(sources, size)) {
        return Invalid("the sources of a ppermute are no permutations of ", size, " ranks.");
      }
    }
    const char* const name = AlgorithmName(this->algorithm);
    if (IsMatmul(this->algorithm)) return Invalid(name, " is no collective.");
    if (!CanCut(this->algorithm, segments)) {
      return Invalid(name, " can't run in ", segments, " segments.");
    }
    const bool is_cube_mesh = this->communicator->is_cube_mesh;
    if ((this->algorithm == Algorithm::kHybridCubeMesh) != is_cube_mesh) {
      return Invalid(
          name, " can't run on groups that are ", is_cube_mesh ? "a" : "no",
          " hybrid cube mesh. Was the program compiled with another JAX_INTRANODE_TOPOLOGY? "
          "Compile it again.");
    }
    return ffi::Error::Success();
  }
};

// Registers `State`, the type that an instantiate handler returns, with the runtime that calls the
// handler. The runtime asks a handler for its metadata when it registers the handler, and the type
// must be known then. JAX's own deferred registration would pass the types after the handlers.
template <class State>
void RegisterStateType(const XLA_FFI_Api* api) {
  static std::once_flag once;
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<State>();
  std::call_once(once, [&] {
    // Without the type the runtime refuses the handler with a message of its own.
    if (XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(api, State::kName, &State::id, &info)) {
      ffi::internal::DestroyError(api, error);
    }
  });
}

// The handler that makes the state of a call site for execute. All devices of the executable share
// it; read only. `State` has kName, id, and Read(attributes), which returns what is wrong with
// them.
template <class State>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  RegisterStateType<State>(frame->api);
  constexpr auto kInstantiate =
      [](ffi::Dictionary attributes) -> ffi::ErrorOr<std::unique_ptr<State>> {
    auto site = std::make_unique<State>();
    if (ffi::Error error = site->Read(attributes); error.failure()) {
      return ffi::Unexpected(std::move(error));
    }
    return {std::move(site)};
  };
  static auto* const handler = ffi::Ffi::BindInstantiate().Attrs().To(kInstantiate).release();
  return handler->Call(frame);
}

// Binds what the other handlers of collectives take after other contexts: the device, the site and
// the operands. The attributes have been read, but must be bound.
template <class State, class Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::State<State>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

// The error of a program that outlived its communicators.
constexpr char kShutDown[] =
    "jax_intranode: this program was compiled before jax_intranode.shutdown() and can't run any "
    "more. Call jax.clear_caches() and compile it again.";

}  // namespace jax_intranode
