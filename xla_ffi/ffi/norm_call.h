// The operands of a norm, checked, and its division into operations that fit an epoch buffer.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "../kernels/norm.h"
#include "common.h"

namespace jax_intranode {

// The FFI targets of norms. All of them have one handler.
inline std::set<std::string> NormTargets() {
  std::set<std::string> names;
  for (Algorithm algorithm : kAlgorithms) {
    if (IsNorm(algorithm)) names.insert(std::string("jax_intranode_") + OperationName(algorithm));
  }
  return names;
}

// Operands: x, residual, weight and perhaps bias. Results: normed, new residual. Refuses what must
// not reach a kernel, though lowering lets none of it pass.
inline ffi::Error CollectNorm(Algorithm algorithm, int size, float eps, float weight_offset,
                              ffi::RemainingArgs xs, ffi::RemainingRets ys, ElementType* type,
                              NormCall* call) {
  const auto refused = [algorithm](const std::string& why) {
    return ffi::Error::InvalidArgument("jax_intranode: " + std::string(OperationName(algorithm)) +
                                       " got " + why + ".");
  };
  if ((xs.size() != 3 && xs.size() != 4) || ys.size() != 2) {
    return refused(std::to_string(xs.size()) + " operands and " + std::to_string(ys.size()) +
                   " results; it takes 3 or 4 operands and returns 2");
  }
  void* data[6] = {};
  size_t elements[6] = {};
  ffi::DataType types[6] = {};
  const size_t operands = xs.size();
  for (size_t i = 0; i < operands; ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> x = xs.get<ffi::AnyBuffer>(i);
    if (!x.has_value()) return std::move(x.error());
    data[i] = x->untyped_data();
    elements[i] = x->element_count();
    types[i] = x->element_type();
  }
  for (size_t i = 0; i < 2; ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> y = ys.get<ffi::AnyBuffer>(i);
    if (!y.has_value()) return std::move(y.error());
    data[4 + i] = (*y)->untyped_data();
    elements[4 + i] = (*y)->element_count();
    types[4 + i] = (*y)->element_type();
  }
  const std::optional<ElementType> found = ElementTypeOf(algorithm, types[0]);
  if (!found || !HasNorm(*found)) {
    return refused("element type " + std::to_string(static_cast<int>(types[0])) +
                   "; it supports float32, bfloat16 and float16");
  }
  if (types[1] != types[0] || types[4] != types[0] || types[5] != types[0]) {
    return refused("a residual or results of another type than x");
  }
  if (types[2] != types[0] && types[2] != ffi::F32) {
    return refused("a weight that is neither of the type of x nor float32");
  }
  if (operands == 4 && (types[3] != types[2] || elements[3] != elements[2])) {
    return refused("a bias of another type or length than the weight");
  }
  const size_t hidden = elements[2];
  if (hidden < 1 || hidden > kMaxHidden) {
    return refused("rows of " + std::to_string(hidden) + " elements; it takes 1 to " +
                   std::to_string(kMaxHidden));
  }
  const size_t shards = InputShards(algorithm, size);
  if (elements[1] == 0 || elements[1] % hidden != 0 || elements[0] != elements[1] * shards ||
      elements[4] != elements[1] || elements[5] != elements[1]) {
    return refused(std::to_string(elements[0]) + " elements of x, " + std::to_string(elements[1]) +
                   " of the residual, and " + std::to_string(elements[4]) + " and " +
                   std::to_string(elements[5]) + " of the results, for rows of " +
                   std::to_string(hidden) + " among " + std::to_string(size) + " ranks");
  }
  *type = *found;
  const size_t row_bytes = hidden * ItemBytes(*found);
  uintptr_t addresses = row_bytes;
  for (const void* at : data) addresses |= reinterpret_cast<uintptr_t>(at);
  *call = {.x = data[0],
           .residual = data[1],
           .weight = data[2],
           .bias = data[3],
           .normed = data[4],
           .new_residual = data[5],
           .shard_bytes = shards == 1 ? 0 : elements[1] * ItemBytes(*found),
           .rows = elements[1] / hidden,
           .hidden = static_cast<uint32_t>(hidden),
           .eps = eps,
           .weight_offset = weight_offset,
           .algorithm = algorithm,
           .protocol = NormProtocolOf(algorithm),
           .layer_norm = IsLayerNorm(algorithm),
           .float32_parameters = types[2] == ffi::F32,
           .aligned = addresses % sizeof(Pack) == 0};
  return ffi::Error::Success();
}

// Calls `run` for parts of the rows, one after another, each of which fits an epoch buffer. All
// ranks divide alike. Stops at the first error.
template <class Run>
ffi::Error ForEachNormOperation(const NormCall& whole, ElementType type, int size,
                                size_t epoch_buffer_bytes, Run run) {
  const size_t row_bytes = whole.hidden * ItemBytes(type);
  const size_t most =
      NormRowsPerOperation(whole.algorithm, PacksOf(row_bytes), size, epoch_buffer_bytes);
  if (most == 0) {
    return ffi::Error::InvalidArgument(
        "jax_intranode: " + std::string(OperationName(whole.algorithm)) + " of rows of " +
        std::to_string(row_bytes) + " bytes does not fit a buffer of the slab, which has " +
        std::to_string(epoch_buffer_bytes) +
        " bytes. Was the program compiled with another JAX_INTRANODE_SLAB_MIB? Compile it again.");
  }
  for (size_t row = 0; row < whole.rows; row += most) {
    NormCall part = whole;
    const size_t offset = row * row_bytes;
    part.x = static_cast<const char*>(whole.x) + offset;
    part.residual = static_cast<const char*>(whole.residual) + offset;
    part.normed = static_cast<char*>(whole.normed) + offset;
    part.new_residual = static_cast<char*>(whole.new_residual) + offset;
    part.rows = std::min(most, whole.rows - row);
    if (ffi::Error error = run(part); error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace jax_intranode
