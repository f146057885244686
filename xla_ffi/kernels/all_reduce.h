// What a caller of an all-reduce has to know: names, limits and sizes. No kernels, no XLA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_intranode {

// The order is that of ALGORITHMS in select.py: the numbers travel in the HLO.
enum class Algorithm : int32_t { kOneShot = 0, kTwoShot = 1 };

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

// Bytes that a call of `packs` packs takes in a half of each rank's region (group.h).
inline size_t HalfBytesNeeded(Algorithm algorithm, ElementType type, size_t packs, int size) {
  const bool bare =
      type == ElementType::kF32 || type == ElementType::kBF16 || type == ElementType::kF16;
  const size_t packet = bare ? 16 : 32, n = size;
  if (algorithm == Algorithm::kOneShot) return n * packs * packet;
  const size_t shard = packs > n ? (packs + n - 1) / n : 1;
  return 2 * n * shard * packet;
}

}  // namespace jax_intranode
