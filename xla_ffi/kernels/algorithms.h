// What a caller of a collective has to know: names, limits and sizes. No kernels, no XLA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_intranode {

// The order is that of ALGORITHMS in select.py: the numbers travel in the HLO.
enum class Algorithm : int32_t {
  kOneShot = 0,  // all-reduce
  kTwoShot = 1,  // all-reduce
  kReduceScatter = 2,
  kAllGather = 3,
  kAllGatherMatmul = 4,
  kMatmulReduceScatter = 5,
};

// The operation that an algorithm does, by its name in Python.
inline const char* OperationName(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kOneShot:
    case Algorithm::kTwoShot:
      return "psum";
    case Algorithm::kReduceScatter:
      return "psum_scatter";
    case Algorithm::kAllGather:
      return "all_gather";
    case Algorithm::kAllGatherMatmul:
      return "all_gather_matmul";
    case Algorithm::kMatmulReduceScatter:
      return "matmul_reduce_scatter";
  }
  return "?";
}

// What `in` and `out` of a call hold, in chunks of its `bytes`: an all-reduce has one of each.
inline size_t InputChunks(Algorithm algorithm, int size) {
  return algorithm == Algorithm::kReduceScatter ? size : 1;
}
inline size_t OutputChunks(Algorithm algorithm, int size) {
  return algorithm == Algorithm::kAllGather ? size : 1;
}

enum class ElementType : int32_t { kF32, kBF16, kF16, kF64, kI8, kI32, kI64 };

inline size_t ItemBytes(ElementType type) {
  switch (type) {
    case ElementType::kI8:
      return 1;
    case ElementType::kBF16:
    case ElementType::kF16:
      return 2;
    case ElementType::kF32:
    case ElementType::kI32:
      return 4;
    case ElementType::kF64:
    case ElementType::kI64:
      return 8;
  }
  return 0;
}

// The type whose packets carry the bits of `type` where nothing is summed.
inline ElementType CopiedAs(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return ElementType::kF32;
    case ElementType::kBF16:
    case ElementType::kF16:
      return ElementType::kBF16;
    default:
      return ElementType::kI8;
  }
}

// Bytes that a call of `packs` packs takes in a half of each rank's region (group.h).
inline size_t HalfBytesNeeded(Algorithm algorithm, ElementType type, size_t packs, int size) {
  const bool bare =
      type == ElementType::kF32 || type == ElementType::kBF16 || type == ElementType::kF16;
  const size_t packet = bare ? 16 : 32, n = size;
  if (algorithm != Algorithm::kTwoShot) return n * packs * packet;
  const size_t shard = packs > n ? (packs + n - 1) / n : 1;
  return 2 * n * shard * packet;
}

}  // namespace jax_intranode
