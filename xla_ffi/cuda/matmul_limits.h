// Sizes and limits of collective matmuls that callers need to know. No CUDA, no XLA: Python gets
// them from the _host module, which is always built.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../kernels/algorithms.h"

namespace jax_intranode {

constexpr int64_t kMatmulElementBytes = 2;  // of bf16 and f16
constexpr int64_t kMatmulDimMultiple = 8;   // K and N are multiples of it: rows of 16-byte packs

// The fused kernel (fused_matmul.h). It is compiled for GPUs of this compute capability only (9:
// the Hopper generation), because it uses instructions that other generations lack.

constexpr int kFusedComputeCapability = 9;  // major

constexpr int kTileRows = 128;   // rows of a tile
constexpr int kTileDepth = 64;   // columns of an operand (elements of K) loaded at a time
constexpr int kClusterSize = 2;  // blocks of a cluster; each computes one row tile of a row pair
constexpr int kMaxMatrices = 4;  // matrices of a call: all multiplied with one x, or one term each
constexpr int kTileColumns[] = {128, 192, 224, 256};  // tile widths for which kernels are compiled
constexpr int kWgradColumns = 256;  // tile width of kernels that also compute weight gradients
                                    // (128 and 192 took 5 to 11 % longer)

// The widest tile whose products fit the registers of one math warpgroup. Up to this width the
// warpgroups alternate tiles: one multiplies while the other one stores.
constexpr int kMaxAlternatingColumns = 192;

// In groups of at most this many ranks shards arrive one after another: the ranks keep in step. In
// larger groups the shards of all peers arrive together (fused_order.h).
constexpr int kMostInStep = 4;

// Whether there is a kernel for this tile width, with or without weight gradients.
constexpr bool HasFusedKernel(Algorithm algorithm, int tile_columns, bool wgrad) {
  if (wgrad) return tile_columns == kWgradColumns;
  // Products travel in whole chunks.
  if (algorithm != Algorithm::kAllGatherMatmul && tile_columns % kTileDepth != 0) return false;
  for (const int columns : kTileColumns) {
    if (tile_columns == columns) return true;
  }
  return false;
}

// The ring buffer: a header (signals.h), one 32-bit flag per chunk of data, then the data.

constexpr size_t kChunkBytes = kTileRows * kTileDepth * kMatmulElementBytes;
constexpr size_t kRingHeaderBytes = 4096;

constexpr size_t RingDataOffset(size_t ring_bytes) {
  const size_t flags = ring_bytes / kChunkBytes * sizeof(uint32_t);
  return kRingHeaderBytes + (flags + 4095) / 4096 * 4096;
}

// The kernel of few rows (few_rows.h), which is compiled for the same GPUs as the fused one.

constexpr int64_t kMostFewRows = 64;
constexpr int64_t kMostFewRowsSize = int64_t{1} << 20;  // of K and N

// Whether it can multiply m rows of k elements with a matrix of n columns.
constexpr bool FewRowsFit(int64_t m, int64_t k, int64_t n) {
  return 0 < m && m <= kMostFewRows && 0 < k && k <= kMostFewRowsSize && 0 < n &&
         n <= kMostFewRowsSize && k % kMatmulDimMultiple == 0 && n % kMatmulDimMultiple == 0;
}

// The cuBLASLt pipeline (pipelined_matmul.h).

constexpr int kMaxPieces = 16;    // first_pieces and last_pieces of a plan
constexpr int64_t kMinSlots = 4;  // a row of x takes at most 1 / kMinSlots of a ring

// cuBLASLt's workspace: a counter of tiles, as none of its algorithms that are used splits K.
constexpr size_t kMatmulWorkspaceBytes = 64 << 10;
constexpr size_t kScratchAlignment = 256;

}  // namespace jax_intranode
