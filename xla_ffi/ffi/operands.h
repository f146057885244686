// The operands of a call, checked, and the operations that the call takes. All platforms share it.
#pragma once

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../kernels/algorithms.h"
#include "../kernels/buffers.h"
#include "../kernels/experts_call.h"
#include "../kernels/hybrid_cube_mesh.h"
#include "../kernels/norm.h"
#include "../kernels/permute.h"
#include "../kernels/ragged_call.h"
#include "site.h"

namespace jax_intranode {

// The element type that runs an algorithm on an operand, if there is one.
inline std::optional<ElementType> ElementTypeOf(Algorithm algorithm, ffi::DataType type) {
  const bool sums = ReductionOf(algorithm) == Reduction::kSum;
  switch (type) {
#define JIN_X(xla_name, numpy_name, sum, extreme) \
  case ffi::xla_name:                             \
    return sums ? ElementType::k##sum : ElementType::k##extreme;
    JIN_DTYPES(JIN_X)
#undef JIN_X
    default:
      if (OnlyCopies(algorithm)) return ElementType::kI8;
      return std::nullopt;
  }
}

// The FFI targets of collectives and norms. All of them have one handler.
inline std::set<std::string> CollectiveTargets() {
  std::set<std::string> names;
  for (Algorithm algorithm : kAlgorithms) {
    if (!IsMatmul(algorithm)) {
      names.insert(std::string("jax_intranode_") + OperationName(algorithm));
    }
  }
  return names;
}

// All operands and results of a call.
struct Operands {
  std::vector<ffi::AnyBuffer> in, out;

  ffi::Error Read(ffi::RemainingArgs xs, ffi::RemainingRets ys) {
    for (size_t i = 0; i < xs.size(); ++i) {
      ffi::ErrorOr<ffi::AnyBuffer> x = xs.get<ffi::AnyBuffer>(i);
      if (!x.has_value()) return std::move(x.error());
      in.push_back(*x);
    }
    for (size_t i = 0; i < ys.size(); ++i) {
      ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> y = ys.get<ffi::AnyBuffer>(i);
      if (!y.has_value()) return std::move(y.error());
      out.push_back(**y);
    }
    return ffi::Error::Success();
  }
};

// Fills in the buffers of a call. Refuses operands that must not reach a kernel, though lowering
// lets none of them pass.
inline ffi::Error CollectBuffers(Algorithm algorithm, uint32_t segments, int size,
                                 size_t epoch_buffer_bytes, const Operands& operands,
                                 ElementType* type, Buffers* buffers) {
  const auto& [xs, ys] = operands;
  const std::string name = OperationName(algorithm);
  const size_t most = IsAllReduce(algorithm)             ? kMaxBuffers
                      : algorithm == Algorithm::kPermute ? kMaxMembers
                                                         : 1;
  if (xs.size() != ys.size() || xs.size() < 1 || xs.size() > most) {
    return Invalid(name, " got ", xs.size(), " operands and ", ys.size(),
                   " results; it takes 1 to ", most, " operands and returns as many.");
  }
  size_t packs = 0;
  for (size_t i = 0; i < xs.size(); ++i) {
    const ffi::AnyBuffer &x = xs[i], &y = ys[i];
    const ffi::DataType x_type = x.element_type(), y_type = y.element_type();
    const std::optional<ElementType> found = ElementTypeOf(algorithm, x_type);
    if (!found || x_type != y_type || (i > 0 && *found != *type)) {
      return Invalid(
          "operand ", i, " of ", name, " has element type ", static_cast<int>(x_type),
          ", its result ", static_cast<int>(y_type),
          "; all operands must have one type that the operation supports, and results the same.");
    }
    const size_t in = InputShards(algorithm, size), out = OutputShards(algorithm, size);
    if (x.element_count() * out != y.element_count() * in || x.element_count() % in != 0) {
      return Invalid("operand ", i, " of ", name, " has ", x.element_count(),
                     " elements, its result ", y.element_count(), "; a group of ", size,
                     " ranks needs them as ", in, " to ", out, ", without a remainder.");
    }
    *type = *found;
    packs += PacksOf(x.size_bytes() / in);
    buffers->Append({x.untyped_data(), y.untyped_data(), x.size_bytes() / in});
  }
  if (packs == 0) return Invalid(name, " of no elements.");
  if (xs.size() > 1 && packs > kMaxPacks) {
    return Invalid(name, " of ", packs, " packs of 16 bytes in many operands; it takes ", kMaxPacks,
                   ".");
  }
  const size_t needed = EpochBufferBytesNeeded(algorithm, *type, packs, size, segments);
  if (needed > epoch_buffer_bytes) {
    return Invalid(
        name, " of ", packs * sizeof(Pack), " bytes takes ", needed,
        " bytes of each buffer of the slab, which has ", epoch_buffer_bytes,
        ". Was the program compiled with another JAX_INTRANODE_SLAB_MIB? Compile it again.");
  }
  return ffi::Error::Success();
}

// Operands: x, residual, weight and perhaps bias. Results: normed, new residual. Refuses what must
// not reach a kernel, though lowering lets none of it pass.
inline ffi::Error CollectNorm(Algorithm algorithm, int size, float eps, float weight_offset,
                              const Operands& operands, ElementType* type, NormCall* call) {
  const auto refused = [algorithm](const auto&... why) {
    return Invalid(OperationName(algorithm), " got ", why..., ".");
  };
  const auto& [xs, ys] = operands;
  if ((xs.size() != 3 && xs.size() != 4) || ys.size() != 2) {
    return refused(xs.size(), " operands and ", ys.size(),
                   " results; it takes 3 or 4 operands and returns 2");
  }
  void* data[6] = {};
  size_t elements[6] = {};
  ffi::DataType types[6] = {};
  const auto add = [&](size_t i, const ffi::AnyBuffer& buffer) {
    data[i] = buffer.untyped_data();
    elements[i] = buffer.element_count();
    types[i] = buffer.element_type();
  };
  for (size_t i = 0; i < xs.size(); ++i) add(i, xs[i]);
  for (size_t i = 0; i < 2; ++i) add(4 + i, ys[i]);
  const std::optional<ElementType> found = ElementTypeOf(algorithm, types[0]);
  if (!found || !HasNorm(*found)) {
    return refused("element type ", static_cast<int>(types[0]),
                   "; it supports float32, bfloat16 and float16");
  }
  if (types[1] != types[0] || types[4] != types[0] || types[5] != types[0]) {
    return refused("a residual or results of another type than x");
  }
  if (types[2] != types[0] && types[2] != ffi::F32) {
    return refused("a weight that is neither of the type of x nor float32");
  }
  if (xs.size() == 4 && (types[3] != types[2] || elements[3] != elements[2])) {
    return refused("a bias of another type or length than the weight");
  }
  const size_t hidden = elements[2];
  if (hidden < 1 || hidden > kMaxHidden) {
    return refused("rows of ", hidden, " elements; it takes 1 to ", kMaxHidden);
  }
  const size_t shards = InputShards(algorithm, size);
  if (elements[1] == 0 || elements[1] % hidden != 0 || elements[0] != elements[1] * shards ||
      elements[4] != elements[1] || elements[5] != elements[1]) {
    return refused(elements[0], " elements of x, ", elements[1], " of the residual, and ",
                   elements[4], " and ", elements[5], " of the results, for rows of ", hidden,
                   " among ", size, " ranks");
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
    return Invalid(
        OperationName(whole.algorithm), " of rows of ", row_bytes,
        " bytes does not fit a buffer of the slab, which has ", epoch_buffer_bytes,
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

// The members of a permute as rank `rank` sees them; `sources` as in site.h.
inline ffi::Error CollectPermutes(const std::vector<int>& sources, int size, int rank,
                                  const Buffers& buffers, Permutes* permutes) {
  if (sources.size() != static_cast<size_t>(buffers.count) * size) {
    return Invalid("ppermute of ", buffers.count, " arrays among ", size, " ranks has ",
                   sources.size(), " sources.");
  }
  for (int m = 0; m < buffers.count; ++m) {
    const auto first = sources.begin() + m * size, last = first + size;
    const auto to = std::find(first, last, rank);
    permutes->Append(buffers.buffer[m], first[rank],
                     to == last ? -1 : static_cast<int>(to - first));
  }
  return ffi::Error::Success();
}

// The length of the first dimension.
inline size_t RowsOf(const ffi::AnyBuffer& x) {
  const auto dimensions = x.dimensions();
  return dimensions.size() == 0 ? 0 : static_cast<size_t>(dimensions[0]);
}

// Operands: operand, output, and four tables of int32. The result takes the memory of output, as
// lowering has told XLA. But XLA:GPU has a call write into a part of a larger array, which a loop
// stacks. Refuses what must not reach a kernel, though lowering lets none of it pass.
inline ffi::Error CollectRagged(int size, int blocks, size_t epoch_buffer_bytes,
                                const Operands& operands, ElementType* type, RaggedCall* call) {
  const auto refused = [](const auto&... why) {
    return Invalid("ragged_all_to_all got ", why..., ".");
  };
  const auto& [xs, ys] = operands;
  if (xs.size() != 6 || ys.size() != 1) {
    return refused(xs.size(), " operands and ", ys.size(), " results; it takes 6 and returns 1");
  }
  const size_t in_rows = RowsOf(xs[0]), out_rows = RowsOf(xs[1]), count = xs[2].element_count();
  const std::optional<ElementType> found = ElementTypeOf(Algorithm::kRagged, xs[0].element_type());
  const size_t bytes = xs[0].size_bytes(), out_bytes = xs[1].size_bytes();
  const ffi::DataType type_of_rows = xs[0].element_type();
  if (!found || xs[1].element_type() != type_of_rows || ys[0].element_type() != type_of_rows ||
      bytes == 0 || out_bytes == 0 || in_rows > INT32_MAX || out_rows > INT32_MAX ||
      bytes / in_rows != out_bytes / out_rows || ys[0].size_bytes() != out_bytes ||
      xs[0].untyped_data() == ys[0].untyped_data()) {
    return refused("an operand of ", in_rows, " rows and ", bytes, " bytes, and an output of ",
                   out_rows, " rows and ", out_bytes,
                   " bytes; their types and rows must be alike, and the result is not the operand");
  }
  for (size_t i = 2; i < 6; ++i) {
    if (xs[i].element_type() != ffi::S32 || xs[i].element_count() != count || count == 0 ||
        count > kMaxUpdates || count % size != 0) {
      return refused("tables that are not int32, or that have no update for each of ", size,
                     " ranks or more than ", kMaxUpdates, " together");
    }
  }
  const auto table = [&](size_t i) { return static_cast<const int32_t*>(xs[i].untyped_data()); };
  const size_t row_bytes = bytes / in_rows;
  const auto updates = static_cast<uint32_t>(count / size);
  const size_t most = std::min(in_rows, out_rows) * row_bytes;
  if (PacksOf(most) > INT32_MAX / updates || row_bytes > UINT32_MAX) {
    return refused("updates of up to ", most, " bytes, ", updates,
                   " for each rank, which are too many packs");
  }
  *type = *found;
  *call = {.in = xs[0].untyped_data(),
           .out = ys[0].untyped_data(),
           .input_offsets = table(2),
           .send_sizes = table(3),
           .output_offsets = table(4),
           .recv_sizes = table(5),
           .row_bytes = static_cast<uint32_t>(row_bytes),
           .in_rows = static_cast<uint32_t>(in_rows),
           .out_rows = static_cast<uint32_t>(out_rows),
           .updates = updates,
           .window = RaggedWindow(epoch_buffer_bytes, size, blocks, updates, PacketBytes(*type))};
  if (ys[0].untyped_data() != xs[1].untyped_data()) call->kept = xs[1].untyped_data();
  if (call->window > 0) return ffi::Error::Success();
  return refused(count, " updates and ", blocks, " blocks, for which a buffer of the slab of ",
                 epoch_buffer_bytes,
                 " bytes has no room. Was the program compiled with another "
                 "JAX_INTRANODE_SLAB_MIB? Compile it again");
}

// Operands of a dispatch: tokens, places, ranks and the rows that are used; of a combine: outputs,
// weights, places and ranks (kernels/experts_call.h). Refuses what must not reach a kernel, though
// lowering lets none of it pass.
inline ffi::Error CollectExperts(Algorithm algorithm, int size, int blocks,
                                 size_t epoch_buffer_bytes, const Operands& operands,
                                 ElementType* type, ExpertsCall* call) {
  const auto refused = [algorithm](const auto&... why) {
    return Invalid(OperationName(algorithm), " got ", why..., ".");
  };
  const auto& [xs, ys] = operands;
  if (xs.size() != 4 || ys.size() != 1) {
    return refused(xs.size(), " operands and ", ys.size(), " results; it takes 4 and returns 1");
  }
  const bool combines = algorithm == Algorithm::kCombine;
  const ffi::AnyBuffer &x = xs[0], &y = ys[0], &places = xs[combines ? 2 : 1],
                       &ranks = xs[combines ? 3 : 2];
  const size_t rows = RowsOf(x), out_rows = RowsOf(y), tokens = combines ? out_rows : rows;
  const std::optional<ElementType> found = ElementTypeOf(algorithm, x.element_type());
  if (!found || !HasNorm(*found) || y.element_type() != x.element_type() || x.size_bytes() == 0 ||
      y.size_bytes() == 0 || x.size_bytes() / rows != y.size_bytes() / out_rows) {
    return refused(rows, " rows of ", x.size_bytes(), " bytes, and a result of ", out_rows,
                   " rows and ", y.size_bytes(),
                   " bytes; both must be float32, bfloat16 or float16, and rows of one length");
  }
  const size_t row_bytes = x.size_bytes() / rows, of_ranks = tokens * size;
  const size_t choices = places.element_count() / of_ranks;
  if (places.element_type() != ffi::S32 || ranks.element_type() != ffi::S32 || choices == 0 ||
      places.element_count() != of_ranks * choices || ranks.element_count() != tokens ||
      (combines
           ? xs[1].element_type() != ffi::F32 || xs[1].element_count() != places.element_count()
           : xs[3].element_type() != ffi::S32 || xs[3].element_count() != 1)) {
    return refused("a layout that is not one of ", tokens, " tokens of each of ", size, " ranks");
  }
  if (PacksOf(row_bytes) * tokens > INT32_MAX || places.element_count() > INT32_MAX ||
      std::max(rows, out_rows) > INT32_MAX || row_bytes > INT32_MAX) {
    return refused(rows, " rows of ", row_bytes, " bytes, which are too many");
  }
  const auto data = [](const ffi::AnyBuffer& buffer) { return buffer.untyped_data(); };
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(data(x)) | reinterpret_cast<uintptr_t>(data(y)) | row_bytes;
  *type = *found;
  *call = {.in = data(x),
           .out = data(y),
           .weights = combines ? static_cast<const float*>(data(xs[1])) : nullptr,
           .places = static_cast<const int32_t*>(data(places)),
           .ranks = static_cast<const int32_t*>(data(ranks)),
           .used = combines ? nullptr : static_cast<const int32_t*>(data(xs[3])),
           .row_bytes = static_cast<uint32_t>(row_bytes),
           .tokens = static_cast<uint32_t>(tokens),
           .choices = static_cast<uint32_t>(choices),
           .capacity = static_cast<uint32_t>(combines ? rows : out_rows),
           .window = RaggedWindow(std::min(epoch_buffer_bytes, kMostWindowBytes), size, blocks, 1,
                                  PacketBytes(*type)),
           .aligned = addresses % sizeof(Pack) == 0};
  if (call->window > 0) return ffi::Error::Success();
  return refused(blocks, " blocks, for which a buffer of the slab of ", epoch_buffer_bytes,
                 " bytes has no room. Was the program compiled with another "
                 "JAX_INTRANODE_SLAB_MIB? Compile it again");
}

// Operands of a dispatch that finds who goes where: tokens, the experts of each, and their weights.
// Results: rows, the weights of all ranks, places, ranks, sizes, used, dropped
// (kernels/experts_call.h). Refuses what must not reach a kernel, though lowering lets none of it
// pass.
inline ffi::Error CollectRouted(int size, int blocks, size_t epoch_buffer_bytes,
                                const Operands& operands, ElementType* type, RoutedCall* call) {
  const auto& [xs, ys] = operands;
  if (xs.size() != 3 || ys.size() != 7) {
    return Invalid("moe_dispatch got ", xs.size(), " operands and ", ys.size(),
                   " results; it takes 3 and returns 7.");
  }
  const ffi::AnyBuffer &x = xs[0], &y = ys[0];
  const size_t tokens = std::max<size_t>(RowsOf(x), 1), row_bytes = x.size_bytes() / tokens;
  const size_t capacity = RowsOf(y), ids = xs[1].element_count(), experts = ys[4].element_count();
  const size_t packs = PacksOf(row_bytes) * tokens;
  const std::optional<ElementType> found =
      ElementTypeOf(Algorithm::kRoutedDispatch, x.element_type());
  bool fits = found && HasNorm(*found) && y.element_type() == x.element_type() &&
              y.size_bytes() == capacity * row_bytes && y.size_bytes() > 0 && ids % tokens == 0 &&
              std::max({packs, capacity, row_bytes}) <= INT32_MAX &&
              RoutedFits(size, ids, experts, blocks, packs * sizeof(Pack), epoch_buffer_bytes);
  const auto data = [&fits](const ffi::AnyBuffer& buffer, size_t elements,
                            ffi::DataType type = ffi::S32) {
    fits = fits && buffer.element_type() == type && buffer.element_count() == elements;
    return static_cast<int32_t*>(buffer.untyped_data());
  };
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(x.untyped_data()) |
                              reinterpret_cast<uintptr_t>(y.untyped_data()) | row_bytes;
  *call = {.rows = {.in = x.untyped_data(),
                    .out = y.untyped_data(),
                    .row_bytes = static_cast<uint32_t>(row_bytes),
                    .tokens = static_cast<uint32_t>(tokens),
                    .choices = static_cast<uint32_t>(ids / tokens),
                    .capacity = static_cast<uint32_t>(capacity),
                    .aligned = addresses % sizeof(Pack) == 0},
           .ids = {data(xs[1], ids), data(ys[2], ids * size), ids * sizeof(int32_t)},
           .weights = {data(xs[2], ids, ffi::F32), data(ys[1], ids * size, ffi::F32),
                       ids * sizeof(float)},
           .ranks = data(ys[3], tokens),
           .sizes = data(ys[4], experts),
           .used = data(ys[5], 1),
           .dropped = data(ys[6], size),
           .experts = static_cast<uint32_t>(experts)};
  if (!fits) {
    return Invalid("a moe_dispatch of ", tokens, " tokens of ", row_bytes, " bytes, with ", ids,
                   " choices of ", experts, " experts of a rank and ", capacity, " rows of ",
                   y.size_bytes(), " bytes, does not fit ", size, " ranks, ", blocks,
                   " blocks and a buffer of the slab of ", epoch_buffer_bytes,
                   " bytes. Was the program compiled with another JAX_INTRANODE_SLAB_MIB? Compile "
                   "it again.");
  }
  *type = *found;
  return ffi::Error::Success();
}

// Calls `run(type, call)` for each operation of a site's call on a rank, one after another; `call`
// is Buffers, LinkedBuffers, Permutes, RaggedCall, ExpertsCall, RoutedCall or a NormCall. `links`:
// those of the rank in a hybrid cube mesh. Stops at the first error.
template <class Site, class Run>
ffi::Error ForEachOperation(const Site& site, int size, int rank, size_t epoch_buffer_bytes,
                            const Links& links, ffi::RemainingArgs xs, ffi::RemainingRets ys,
                            Run run) {
  Operands operands;
  if (ffi::Error error = operands.Read(xs, ys); error.failure()) return error;
  ElementType type;
  const int blocks = std::max(site.blocks, 1);  // CPU devices have none
  if (IsOfExperts(site.algorithm)) {
    ExpertsCall call;
    ffi::Error error =
        CollectExperts(site.algorithm, size, blocks, epoch_buffer_bytes, operands, &type, &call);
    return error.failure() ? std::move(error) : run(type, call);
  }
  if (site.algorithm == Algorithm::kRoutedDispatch) {
    RoutedCall call;
    ffi::Error error = CollectRouted(size, blocks, epoch_buffer_bytes, operands, &type, &call);
    return error.failure() ? std::move(error) : run(type, call);
  }
  if (site.algorithm == Algorithm::kRagged) {
    RaggedCall call;
    ffi::Error error = CollectRagged(size, blocks, epoch_buffer_bytes, operands, &type, &call);
    return error.failure() ? std::move(error) : run(type, call);
  }
  if (!IsNorm(site.algorithm)) {
    Buffers buffers;
    ffi::Error error = CollectBuffers(site.algorithm, site.segments, size, epoch_buffer_bytes,
                                      operands, &type, &buffers);
    if (error.failure()) return error;
    if (site.algorithm == Algorithm::kHybridCubeMesh)
      return run(type, LinkedBuffers{buffers, links});
    if (site.algorithm != Algorithm::kPermute) return run(type, buffers);
    Permutes permutes;
    error = CollectPermutes(site.sources, size, rank, buffers, &permutes);
    return error.failure() ? std::move(error) : run(type, permutes);
  }
  NormCall call;
  ffi::Error error =
      CollectNorm(site.algorithm, size, site.eps, site.weight_offset, operands, &type, &call);
  if (error.failure()) return error;
  return ForEachNormOperation(call, type, size, epoch_buffer_bytes,
                              [&](const NormCall& part) { return run(type, part); });
}

}  // namespace jax_intranode
