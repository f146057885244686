// What Python shares with the C++ code: names, numbers, limits and sizes. They describe the CUDA
// kernels, too: _host is always built, and these headers need no CUDA.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "cuda/matmul_plan.h"
#include "kernels/algorithms.h"
#include "kernels/buffers.h"
#include "kernels/experts_call.h"
#include "kernels/failure_reason.h"
#include "kernels/group.h"
#include "kernels/permute.h"
#include "kernels/ragged_call.h"

namespace nb = nanobind;

namespace jax_intranode {
namespace {

ElementType TypeOf(Algorithm algorithm, const std::string& dtype) {
  const std::optional<ElementType> type = ElementTypeNamed(algorithm, dtype);
  if (!type) throw std::invalid_argument("jax_intranode: " + dtype + " has no kernels");
  return *type;
}

Algorithm AlgorithmNamed(const std::string& name) {
  for (Algorithm algorithm : kAlgorithms) {
    if (AlgorithmName(algorithm) == name) return algorithm;
  }
  throw std::invalid_argument("jax_intranode: there is no algorithm " + name);
}

}  // namespace

// Adds them to the module _host, from where jax_intranode/_src/native/definitions.py reads them.
void ExportLimits(nb::module_& m) {
  nb::list algorithms, in_segments, dtypes, widths, fields;
  nb::dict operations, reasons;
  for (Algorithm algorithm : kAlgorithms) {
    const char* const name = AlgorithmName(algorithm);
    algorithms.append(name);
    operations[name] = OperationName(algorithm);
    if (RunsInSegments(algorithm)) in_segments.append(name);
  }
#define JIN_X(xla_name, numpy_name, sum, extreme) dtypes.append(numpy_name);
  JIN_DTYPES(JIN_X)
#undef JIN_X
#define JIN_X(enumerator, number, name) reasons[name] = number;
  JIN_FAILURE_REASONS(JIN_X)
#undef JIN_X
  for (const int columns : kTileColumns) widths.append(columns);
  std::apply([&](const auto&... field) { (fields.append(field.name), ...); }, kPlanFields);
  m.attr("ALGORITHMS") = nb::tuple(algorithms);
  m.attr("OPERATIONS") = operations;
  m.attr("DTYPES") = nb::tuple(dtypes);
  m.attr("FAILURE_REASONS") = reasons;
  m.attr("IN_SEGMENTS") = nb::tuple(in_segments);
  m.attr("TILE_COLUMNS") = nb::tuple(widths);
  m.attr("PLAN_FIELDS") = nb::tuple(fields);

  m.attr("MAX_SEGMENTS") = kMaxSegments;
  m.def(
      "has_own_region", [](const std::string& name) { return HasOwnRegion(AlgorithmNamed(name)); },
      nb::arg("algorithm"), "Whether it has a region of its own, beside that of all others.");
  m.def(
      "segment_packs",
      [](const std::string& name, size_t packs, int world_size, uint32_t segments) {
        return SegmentPacks(AlgorithmNamed(name), packs, world_size, segments);
      },
      nb::arg("algorithm"), nb::arg("packs"), nb::arg("world_size"), nb::arg("segments"),
      "Packs of each of a number of segments.");

  m.attr("MAX_WORLD_SIZE") = kMaxRanks;
  m.attr("MAX_BLOCKS") = kMaxBlocks;
  m.attr("MAX_THREADS") = kMaxThreads;
  m.attr("MAX_BUFFERS") = kMaxBuffers;
  m.attr("MAX_PACKS") = kMaxPacks;
  m.attr("MAX_MEMBERS") = kMaxMembers;
  m.attr("MAX_UPDATES") = kMaxUpdates;
  m.attr("PACK_BYTES") = sizeof(Pack);

  m.def(
      "item_bytes",
      [](const std::string& dtype) { return ItemBytes(TypeOf(Algorithm::kOneShot, dtype)); },
      nb::arg("dtype"), "Bytes of an element of a dtype that can be summed.");
  m.def(
      "packet_bytes",
      [](const std::string& algorithm, const std::string& dtype) {
        return PacketBytes(TypeOf(AlgorithmNamed(algorithm), dtype));
      },
      nb::arg("algorithm"), nb::arg("dtype"),
      "Bytes of the packet that carries PACK_BYTES of data.");
  m.def(
      "epoch_buffer_bytes_needed",
      [](const std::string& name, const std::string& dtype, size_t nbytes, int world_size,
         uint32_t segments) {
        const Algorithm algorithm = AlgorithmNamed(name);
        return EpochBufferBytesNeeded(algorithm, TypeOf(algorithm, dtype), PacksOf(nbytes),
                                      world_size, segments);
      },
      nb::arg("algorithm"), nb::arg("dtype"), nb::arg("nbytes"), nb::arg("world_size"),
      nb::arg("segments"), "Bytes of an epoch buffer that an operation takes.");
  m.def("routed_fits", &RoutedFits, nb::arg("world_size"), nb::arg("ids"), nb::arg("experts"),
        nb::arg("blocks"), nb::arg("nbytes"), nb::arg("epoch_buffer_bytes"),
        "Whether a dispatch of a rank's ids, experts and bytes can find who goes where.");
  m.attr("MAX_HIDDEN") = kMaxHidden;
  m.def(
      "norm_rows_per_operation",
      [](const std::string& name, const std::string& dtype, size_t hidden, int world_size,
         size_t epoch_buffer_bytes) {
        const Algorithm algorithm = AlgorithmNamed(name);
        const size_t row = hidden * ItemBytes(TypeOf(algorithm, dtype));
        return NormRowsPerOperation(algorithm, PacksOf(row), world_size, epoch_buffer_bytes);
      },
      nb::arg("algorithm"), nb::arg("dtype"), nb::arg("hidden"), nb::arg("world_size"),
      nb::arg("epoch_buffer_bytes"), "The most rows that one operation of a norm takes.");
  // Collective matmuls (cuda/matmul_limits.h).
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("TILE_DEPTH") = kTileDepth;
  m.attr("WGRAD_COLUMNS") = kWgradColumns;
  m.attr("MAX_ALTERNATING_COLUMNS") = kMaxAlternatingColumns;
  m.attr("MAX_MATRICES") = kMaxMatrices;
  m.attr("MAX_PIECES") = kMaxPieces;
  m.attr("MOST_FEW_ROWS") = kMostFewRows;
  m.def("few_rows_fit", &FewRowsFit, nb::arg("m"), nb::arg("k"), nb::arg("n"),
        "Whether the kernel of few rows can multiply m rows with a matrix [k, n].");
  m.attr("MIN_SLOTS") = kMinSlots;
  m.attr("MAX_RANKS_IN_STEP") = kMostInStep;
  m.def(
      "has_fused_kernel",
      [](const std::string& operation, int tile_columns, bool wgrad) {
        return HasFusedKernel(AlgorithmNamed(operation), tile_columns, wgrad);
      },
      nb::arg("operation"), nb::arg("tile_columns"), nb::arg("wgrad"),
      "Whether a fused kernel is compiled for this width of tiles.");
  m.def("ring_data_offset", &RingDataOffset, nb::arg("ring_bytes"),
        "Bytes of a ring buffer before its data: the header and the flags.");
}

}  // namespace jax_intranode
