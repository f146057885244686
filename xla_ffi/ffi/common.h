// What the handlers of all platforms share: element types and checks of a call.
#pragma once

#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "../kernels/algorithms.h"
#include "../kernels/buffers.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_intranode {

namespace ffi = ::xla::ffi;

// The element type that runs an algorithm on an operand, if there is one.
inline std::optional<ElementType> ElementTypeOf(Algorithm algorithm, ffi::DataType type) {
  switch (type) {
#define JIN_X(xla_name, numpy_name, type) \
  case ffi::xla_name:                     \
    return ElementType::k##type;
    JIN_DTYPES(JIN_X)
#undef JIN_X
    default:
      if (OnlyCopies(algorithm)) return ElementType::kI8;
      return std::nullopt;
  }
}

inline std::string NoCommunicator(const Partition& partition) {
  return "jax_intranode: there is no communicator for the device groups " + ToString(partition) +
         ". A program that was compiled elsewhere needs jax_intranode.initialize(mesh), with the "
         "mesh that it was compiled for, before it is loaded.";
}

// The FFI targets of the collectives. All of them have one handler.
inline std::set<std::string> CollectiveTargets() {
  std::set<std::string> names;
  for (Algorithm algorithm : kAlgorithms) {
    if (!IsMatmul(algorithm) && !IsNorm(algorithm)) {
      names.insert(std::string("jax_intranode_") + OperationName(algorithm));
    }
  }
  return names;
}

// The error of a program that outlived its communicators.
constexpr char kShutDown[] =
    "jax_intranode: this program was compiled before jax_intranode.shutdown() and can't run any "
    "more. Call jax.clear_caches() and compile it again.";

// Registers `State`, the type that an instantiate handler returns, with the runtime that calls the
// handler. The runtime asks a handler for its metadata when it registers the handler, and the type
// must be known then. JAX's own deferred registration would pass the types after the handlers.
template <class State>
void RegisterStateType(const XLA_FFI_Api* api, std::string_view name) {
  static std::once_flag once;
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<State>();
  std::call_once(once, [&] {
    // Without the type the runtime refuses the handler with a message of its own.
    if (XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(api, name, &State::id, &info)) {
      ffi::internal::DestroyError(api, error);
    }
  });
}

// Refuses a number of segments that the algorithm can't be cut into (segments.h).
inline ffi::Error CheckSegments(Algorithm algorithm, int32_t segments) {
  if (IsNumberOfSegments(segments) && (segments == 1 || RunsInSegments(algorithm))) {
    return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument("jax_intranode: " + std::string(AlgorithmName(algorithm)) +
                                     " can't run in " + std::to_string(segments) + " segments.");
}

// Refuses an algorithm that needs other links than a communicator's groups have.
inline ffi::Error CheckLinks(Algorithm algorithm, bool is_cube_mesh) {
  if ((algorithm == Algorithm::kHybridCubeMesh) == is_cube_mesh) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(
      "jax_intranode: " + std::string(AlgorithmName(algorithm)) + " can't run on groups that are " +
      (is_cube_mesh ? "a hybrid cube mesh" : "no hybrid cube mesh") +
      ". Was the program compiled with another JAX_INTRANODE_TOPOLOGY? Compile it again.");
}

// Fills in the buffers of a call. Refuses operands that must not reach a kernel, though lowering
// lets none of them pass.
inline ffi::Error CollectBuffers(Algorithm algorithm, uint32_t segments, int size,
                                 size_t epoch_buffer_bytes, ffi::RemainingArgs xs,
                                 ffi::RemainingRets ys, ElementType* type, Buffers* buffers) {
  const std::string name = OperationName(algorithm);
  const size_t most = IsAllReduce(algorithm) ? kMaxBuffers : 1;
  if (xs.size() != ys.size() || xs.size() < 1 || xs.size() > most) {
    return ffi::Error::InvalidArgument("jax_intranode: " + name + " got " +
                                       std::to_string(xs.size()) + " operands and " +
                                       std::to_string(ys.size()) + " results; it takes 1 to " +
                                       std::to_string(most) + " operands and returns as many.");
  }
  size_t packs = 0;
  for (size_t i = 0; i < xs.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> x = xs.get<ffi::AnyBuffer>(i);
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> y = ys.get<ffi::AnyBuffer>(i);
    if (!x.has_value()) return std::move(x.error());
    if (!y.has_value()) return std::move(y.error());
    const ffi::DataType x_type = x->element_type(), y_type = (*y)->element_type();
    const std::optional<ElementType> found = ElementTypeOf(algorithm, x_type);
    if (!found || x_type != y_type || (i > 0 && *found != *type)) {
      return ffi::Error::InvalidArgument(
          "jax_intranode: operand " + std::to_string(i) + " of " + name + " has element type " +
          std::to_string(static_cast<int>(x_type)) + ", its result " +
          std::to_string(static_cast<int>(y_type)) +
          "; all operands must have one type that the operation supports, and results the same.");
    }
    const size_t in = InputShards(algorithm, size), out = OutputShards(algorithm, size);
    if (x->element_count() * out != (*y)->element_count() * in) {
      return ffi::Error::InvalidArgument(
          "jax_intranode: operand " + std::to_string(i) + " of " + name + " has " +
          std::to_string(x->element_count()) + " elements, its result " +
          std::to_string((*y)->element_count()) + "; a group of " + std::to_string(size) +
          " ranks needs them as " + std::to_string(in) + " to " + std::to_string(out) + ".");
    }
    *type = *found;
    packs += PacksOf(x->size_bytes() / in);
    buffers->Append({x->untyped_data(), (*y)->untyped_data(), x->size_bytes() / in});
  }
  if (packs == 0) return ffi::Error::InvalidArgument("jax_intranode: " + name + " of no elements.");
  const size_t needed = EpochBufferBytesNeeded(algorithm, *type, packs, size, segments);
  if (needed > epoch_buffer_bytes) {
    return ffi::Error::InvalidArgument(
        "jax_intranode: " + name + " of " + std::to_string(packs * sizeof(Pack)) + " bytes takes " +
        std::to_string(needed) + " bytes of each buffer of the slab, which has " +
        std::to_string(epoch_buffer_bytes) +
        ". Was the program compiled with another JAX_INTRANODE_SLAB_MIB? Compile it again.");
  }
  return ffi::Error::Success();
}

}  // namespace jax_intranode
