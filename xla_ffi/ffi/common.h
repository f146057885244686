// What the handlers of all platforms share: element types and checks of a call.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "../kernels/all_reduce.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_intranode {

namespace ffi = ::xla::ffi;

inline std::optional<ElementType> ElementTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return ElementType::kF32;
    case ffi::BF16:
      return ElementType::kBF16;
    case ffi::F16:
      return ElementType::kF16;
    case ffi::F64:
      return ElementType::kF64;
    case ffi::S8:
    case ffi::U8:
      return ElementType::kI8;
    case ffi::S32:
    case ffi::U32:
      return ElementType::kI32;
    case ffi::S64:
    case ffi::U64:
      return ElementType::kI64;
    default:
      return std::nullopt;
  }
}

inline std::string NoCommunicator(const Partition& partition) {
  return "jax_intranode: there is no communicator for the device groups " + ToString(partition) +
         ". A program that was compiled elsewhere needs jax_intranode.initialize(mesh), with the "
         "mesh that it was compiled for, before it is loaded.";
}

constexpr char kShutDown[] =
    "jax_intranode: this program was compiled before jax_intranode.shutdown() and can't run any "
    "more. Call jax.clear_caches() and compile it again.";

// Registers `State`, what an instantiate handler returns, with the runtime that calls the handler.
// The runtime asks a handler for its metadata when it registers it, and wants the type to be known
// then. JAX's own deferred registration hands it the handlers first and the types after them.
template <class State>
void RegisterStateType(const XLA_FFI_Api* api, std::string_view name) {
  static std::once_flag once;
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<State>();
  std::call_once(once, [&] {
    // Without the type the runtime refuses the handler by itself, with a message of its own.
    if (XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(api, name, &State::id, &info)) {
      ffi::internal::DestroyError(api, error);
    }
  });
}

// Refuses what must not reach a kernel. Lowering has checked all of it before.
inline ffi::Error CheckCall(Algorithm algorithm, int size, size_t half_bytes,
                            const ffi::AnyBuffer& x, const ffi::AnyBuffer& y) {
  const std::optional<ElementType> type = ElementTypeOf(x.element_type());
  if (!type || x.element_type() != y.element_type()) {
    return ffi::Error::InvalidArgument(
        "jax_intranode: psum got element type " +
        std::to_string(static_cast<int>(x.element_type())) + " and returns " +
        std::to_string(static_cast<int>(y.element_type())) +
        "; it takes f32, bf16, f16, f64 and integers of 8, 32 or 64 bits and returns the same.");
  }
  if (x.element_count() != y.element_count()) {
    return ffi::Error::InvalidArgument(
        "jax_intranode: psum got " + std::to_string(x.element_count()) + " elements to sum into " +
        std::to_string(y.element_count()) + ".");
  }
  const size_t needed = HalfBytesNeeded(algorithm, *type, x.size_bytes(), size);
  if (needed > half_bytes) {
    return ffi::Error::InvalidArgument(
        "jax_intranode: psum of " + std::to_string(x.size_bytes()) + " bytes takes " +
        std::to_string(needed) + " bytes of each buffer of the slab, which has " +
        std::to_string(half_bytes) +
        ". Was the program compiled with another JAX_INTRANODE_SLAB_MIB? Compile it again.");
  }
  return ffi::Error::Success();
}

}  // namespace jax_intranode
