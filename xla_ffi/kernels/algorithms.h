// What a caller of a collective has to know: names, limits and sizes. No kernels, no XLA.
//
// The three lists below are the only ones of their kind: handlers, launchers and Python (by way of
// the module _host) take names, numbers and sizes from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace jax_intranode {

// X(enumerator, name, name of the Python function that runs it). The number of an algorithm is its
// position here. The numbers travel in the HLO: append, don't reorder.
#define JIN_ALGORITHMS(X)                                                   \
  X(kOneShot, "one_shot", "psum")                                           \
  X(kTwoShot, "two_shot", "psum")                                           \
  X(kReduceScatter, "reduce_scatter", "psum_scatter")                       \
  X(kAllGather, "all_gather", "all_gather")                                 \
  X(kAllGatherMatmul, "all_gather_matmul", "all_gather_matmul")             \
  X(kMatmulReduceScatter, "matmul_reduce_scatter", "matmul_reduce_scatter") \
  JIN_NORM_PROTOCOLS(X, RmsNorm, "rms_norm")                                \
  JIN_NORM_PROTOCOLS(X, LayerNorm, "layer_norm")                            \
  X(kHybridCubeMesh, "hybrid_cube_mesh", "psum")                            \
  X(kAllToAll, "all_to_all", "all_to_all")                                  \
  X(kOneShotMax, "one_shot_max", "pmax")                                    \
  X(kTwoShotMax, "two_shot_max", "pmax")                                    \
  X(kOneShotMin, "one_shot_min", "pmin")                                    \
  X(kTwoShotMin, "two_shot_min", "pmin")                                    \
  X(kPermute, "permute", "ppermute")                                        \
  X(kRagged, "ragged", "ragged_all_to_all")                                 \
  X(kFewRows, "few_rows", "matmul_all_reduce")                              \
  X(kDispatch, "dispatch", "moe_dispatch")                                  \
  X(kCombine, "combine", "moe_combine")                                     \
  X(kRoutedDispatch, "routed_dispatch", "moe_dispatch")

// The all-reduces and reduce-scatters that add a residual and normalize rows (norm_protocol.h):
// each norm by each protocol, in the order of NormProtocol.
#define JIN_NORM_PROTOCOLS(X, Norm, name)                    \
  X(kOneShot##Norm, "one_shot_" name, "psum_residual_" name) \
  X(kTwoShot##Norm, "two_shot_" name, "psum_residual_" name) \
  X(kReduceScatter##Norm, "reduce_scatter_" name, "psum_scatter_residual_" name)

// X(type, bytes of an element, bytes of a packet). types.h defines a struct of the same name.
#define JIN_ELEMENT_TYPES(X) \
  X(F32, 4, 16)              \
  X(BF16, 2, 16)             \
  X(F16, 2, 16)              \
  X(F64, 8, 32)              \
  X(I8, 1, 32)               \
  X(I32, 4, 32)              \
  X(I64, 8, 32)              \
  X(U8, 1, 32)               \
  X(U32, 4, 32)              \
  X(U64, 8, 32)

// The dtypes that can be reduced. X(name in XLA's FFI, name in NumPy, element type of a sum, of a
// maximum or minimum).
#define JIN_DTYPES(X)             \
  X(F32, "float32", F32, F32)     \
  X(BF16, "bfloat16", BF16, BF16) \
  X(F16, "float16", F16, F16)     \
  X(F64, "float64", F64, F64)     \
  X(S8, "int8", I8, I8)           \
  X(U8, "uint8", I8, U8)          \
  X(S32, "int32", I32, I32)       \
  X(U32, "uint32", I32, U32)      \
  X(S64, "int64", I64, I64)       \
  X(U64, "uint64", I64, U64)

enum class Algorithm : int32_t {
#define JIN_X(enumerator, name, operation) enumerator,
  JIN_ALGORITHMS(JIN_X)
#undef JIN_X
};

constexpr Algorithm kAlgorithms[] = {
#define JIN_X(enumerator, name, operation) Algorithm::enumerator,
    JIN_ALGORITHMS(JIN_X)
#undef JIN_X
};

inline bool IsKnown(Algorithm algorithm) {
  return algorithm >= kAlgorithms[0] && algorithm <= kAlgorithms[std::size(kAlgorithms) - 1];
}

struct AlgorithmNames {
  const char *name, *operation;
};
inline AlgorithmNames NamesOf(Algorithm algorithm) {
  switch (algorithm) {
#define JIN_X(enumerator, name, operation) \
  case Algorithm::enumerator:              \
    return {name, operation};
    JIN_ALGORITHMS(JIN_X)
#undef JIN_X
  }
  return {"?", "?"};
}
inline const char* AlgorithmName(Algorithm algorithm) { return NamesOf(algorithm).name; }
// The Python function that runs an algorithm, for messages.
inline const char* OperationName(Algorithm algorithm) { return NamesOf(algorithm).operation; }

enum class Reduction { kSum, kMax, kMin };

inline Reduction ReductionOf(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kOneShotMax:
    case Algorithm::kTwoShotMax:
      return Reduction::kMax;
    case Algorithm::kOneShotMin:
    case Algorithm::kTwoShotMin:
      return Reduction::kMin;
    default:
      return Reduction::kSum;
  }
}

// The algorithm that sums by the same protocol.
inline Algorithm ProtocolOf(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kOneShotMax:
    case Algorithm::kOneShotMin:
      return Algorithm::kOneShot;
    case Algorithm::kTwoShotMax:
    case Algorithm::kTwoShotMin:
      return Algorithm::kTwoShot;
    default:
      return algorithm;
  }
}

inline bool IsTwoShot(Algorithm algorithm) { return ProtocolOf(algorithm) == Algorithm::kTwoShot; }

// The algorithms of an all-reduce: they take many buffers in one call.
inline bool IsAllReduce(Algorithm algorithm) {
  return ProtocolOf(algorithm) == Algorithm::kOneShot || IsTwoShot(algorithm) ||
         algorithm == Algorithm::kHybridCubeMesh;
}

inline bool IsMatmul(Algorithm algorithm) {
  return algorithm == Algorithm::kAllGatherMatmul || algorithm == Algorithm::kMatmulReduceScatter ||
         algorithm == Algorithm::kFewRows;
}

enum class NormProtocol { kNone, kOneShot, kTwoShot, kReduceScatter };

inline bool IsNorm(Algorithm algorithm) {
  return algorithm >= Algorithm::kOneShotRmsNorm && algorithm <= Algorithm::kReduceScatterLayerNorm;
}

inline bool IsLayerNorm(Algorithm algorithm) {
  return IsNorm(algorithm) && algorithm >= Algorithm::kOneShotLayerNorm;
}

inline NormProtocol NormProtocolOf(Algorithm algorithm) {
  if (!IsNorm(algorithm)) return NormProtocol::kNone;
  const Algorithm first =
      IsLayerNorm(algorithm) ? Algorithm::kOneShotLayerNorm : Algorithm::kOneShotRmsNorm;
  return static_cast<NormProtocol>(1 + static_cast<int>(algorithm) - static_cast<int>(first));
}

// A dispatch or a combine of a mixture of experts (experts.h).
inline bool IsOfExperts(Algorithm algorithm) {
  return algorithm == Algorithm::kDispatch || algorithm == Algorithm::kCombine;
}

// The algorithms whose messages take turns in windows, as many as they need (ragged.h, experts.h).
inline bool RunsInWindows(Algorithm algorithm) {
  return algorithm == Algorithm::kRagged || IsOfExperts(algorithm) ||
         algorithm == Algorithm::kRoutedDispatch;  // in one window
}

// Algorithms that only copy: they take any dtype, as bytes.
inline bool OnlyCopies(Algorithm algorithm) {
  return algorithm == Algorithm::kAllGather || algorithm == Algorithm::kAllToAll ||
         algorithm == Algorithm::kPermute || algorithm == Algorithm::kRagged;
}

// The algorithms that have a region of their own, beside that of all others (permute.h).
inline bool HasOwnRegion(Algorithm algorithm) { return algorithm == Algorithm::kPermute; }

// How many shards of a call's `bytes` its `in` and `out` hold: in a group of `size` ranks the input
// of a reduce-scatter, the output of an all-gather and both of an all-to-all hold one for each
// rank.
inline size_t InputShards(Algorithm algorithm, int size) {
  const bool divides = algorithm == Algorithm::kReduceScatter ||
                       algorithm == Algorithm::kAllToAll ||
                       NormProtocolOf(algorithm) == NormProtocol::kReduceScatter;
  return divides ? size : 1;
}
inline size_t OutputShards(Algorithm algorithm, int size) {
  return algorithm == Algorithm::kAllGather || algorithm == Algorithm::kAllToAll ? size : 1;
}

enum class ElementType : int32_t {
#define JIN_X(type, item_bytes, packet_bytes) k##type,
  JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X
};

constexpr ElementType kElementTypes[] = {
#define JIN_X(type, item_bytes, packet_bytes) ElementType::k##type,
    JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X
};

struct ElementSizes {
  size_t item, packet;
};
constexpr ElementSizes kElementSizes[] = {
#define JIN_X(type, item_bytes, packet_bytes) {item_bytes, packet_bytes},
    JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X
};
inline size_t ItemBytes(ElementType type) { return kElementSizes[static_cast<int>(type)].item; }
// Bytes of the packet that carries 16 bytes of payload (packets.h).
inline size_t PacketBytes(ElementType type) { return kElementSizes[static_cast<int>(type)].packet; }

// The element type that runs an algorithm on a dtype (NumPy's name), if there is one.
inline std::optional<ElementType> ElementTypeNamed(Algorithm algorithm, std::string_view dtype) {
  const bool sums = ReductionOf(algorithm) == Reduction::kSum;
#define JIN_X(xla_name, numpy_name, sum, extreme) \
  if (dtype == numpy_name) return sums ? ElementType::k##sum : ElementType::k##extreme;
  JIN_DTYPES(JIN_X)
#undef JIN_X
  if (OnlyCopies(algorithm)) return ElementType::kI8;
  return std::nullopt;
}

// Whether an algorithm can run over its message in segments (segments.h).
inline bool RunsInSegments(Algorithm algorithm) {
  return ProtocolOf(algorithm) == Algorithm::kOneShot || IsTwoShot(algorithm) ||
         algorithm == Algorithm::kReduceScatter || algorithm == Algorithm::kAllGather ||
         algorithm == Algorithm::kAllToAll;
}

// More than any message needs: with the smallest slab, each is a few KB.
constexpr int kMaxSegments = 1 << 20;

// Whether an algorithm can cut its message into so many segments: an even number (segments.h).
inline bool CanCut(Algorithm algorithm, int64_t segments) {
  return segments == 1 || (segments > 1 && segments % 2 == 0 && segments <= kMaxSegments &&
                           RunsInSegments(algorithm));
}

// The phases of an algorithm that runs in segments.
inline int PhasesOf(Algorithm algorithm) { return IsTwoShot(algorithm) ? 3 : 2; }

// Packs of each segment of a call of `packs` packs. A two-shot divides each segment into a shard
// for each rank, without a remainder that would be a part of the next segment.
inline size_t SegmentPacks(Algorithm algorithm, size_t packs, int size, uint32_t segments) {
  if (segments == 1) return packs;
  const size_t n = IsTwoShot(algorithm) ? size : 1, parts = n * segments;
  return (packs / parts + (packs % parts != 0)) * n;
}

// Bytes that a call of `packs` packs takes in an epoch buffer of each rank's region (group.h).
inline size_t EpochBufferBytesNeeded(Algorithm algorithm, ElementType type, size_t packs, int size,
                                     uint32_t segments = 1) {
  packs = SegmentPacks(algorithm, packs, size, segments);
  const size_t packet = PacketBytes(type), n = size;
  if (algorithm == Algorithm::kPermute) return packs * packet;
  if (algorithm == Algorithm::kFewRows) return n * packs * packet;  // an own slot, too
  if (RunsInWindows(algorithm)) return 2 * (n - 1) * packet;        // at least
  // A slot for each rank of a quad, and one for a sum (hybrid_cube_mesh.h).
  if (algorithm == Algorithm::kHybridCubeMesh) {
    return (n / 2 + (ItemBytes(type) == 2 ? 2 : 1)) * packs * packet;
  }
  // A slot for each other rank; of two segments that share an epoch, or for scatter and gather.
  if (!IsTwoShot(algorithm)) return (segments > 1 ? 2 : 1) * (n - 1) * packs * packet;
  const size_t shard = packs > n ? (packs + n - 1) / n : 1;
  return 2 * (n - 1) * shard * packet;
}

// The longest row that a norm takes, in elements.
constexpr size_t kMaxHidden = 16384;

// The element types of a norm are those that travel in bare packets.
inline bool HasNorm(ElementType type) { return PacketBytes(type) == 16; }

// The most rows of `row_packs` packs that one operation of a norm takes: of a reduce-scatter's
// result, else of the operand. 0 if not even one fits.
inline size_t NormRowsPerOperation(Algorithm algorithm, size_t row_packs, int size,
                                   size_t epoch_buffer_bytes) {
  const size_t rows = epoch_buffer_bytes / ((size - 1) * row_packs * 16);
  // Two-shot has slots for sums, too, but only for its own shard of the rows.
  return NormProtocolOf(algorithm) == NormProtocol::kTwoShot ? rows / 2 * size : rows;
}

}  // namespace jax_intranode
