// The parameters of the fused kernel, which its launch sets. See fused_matmul.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "collectives.h"
#include "fused_order.h"
#include "matmul_limits.h"

namespace jax_intranode {

// Operands and products are moved by chunks: kTileRows rows of kTileDepth elements, 128 bytes a
// row. Chunks of operands have the layout that matrix instructions and tensor maps call "swizzled
// by 128 bytes". A matrix instruction takes or yields the 64 rows of a half chunk.
constexpr uint32_t kChunk = kChunkBytes;
constexpr int kHalfRows = kTileRows / 2;

// A matrix w, its x, and its product. The terms of a reduce-scatter share the first one's product.
struct MatrixParams {
  CUtensorMap x, w;
  CUtensorMap product;
  int first_tile;  // its first column tile among those of all products
  int k_end;       // the end of its chunks of K among those of all terms
};

// A weight gradient, and the x that it is computed from.
struct WgradParams {
  CUtensorMap x;
  CUtensorMap product;
  int first_tile;  // its first column tile among those of all weight gradients
};

struct FusedParams : TileOrder {
  MatrixParams matrix[kMaxMatrices];
  WgradParams wgrad[kMaxMatrices];
  CUtensorMap wgrad_lhs;
  DeviceGroup group;
  char* ring[kMaxRanks];  // each rank's, as this rank addresses it
  size_t data_offset;     // in a ring
  char* scratch;          // reduce-scatter: products on their way to peers, unless `direct`
  const char* x;          // all-gather: this rank's x
  char* gathered;         // all-gather: all ranks' x, or null
  int products;
  int wgrads;
  int rows;              // of one outer index of a shard
  int row_bytes;         // all-gather: of x
  int wgrad_row_tiles;   // the last row pair may have one row tile only
  bool n_major;          // w is [k, n]
  bool direct;           // reduce-scatter: math warpgroups store products in the peer's ring
  uint32_t pace_clocks;  // direct: clocks that storing a pack per thread should take
};
static_assert(sizeof(FusedParams) <= 4096);  // kernel parameters of this size work everywhere

// Warp 0 is the producer warp, warps 1 and 2 are the sender warps, warp 3 copies arriving chunks,
// and the others form the two math warpgroups.
constexpr int kThreads = 3 * 128;
// Registers per thread that a block is given. If its warpgroups ask for more in total, they wait
// forever.
constexpr int kRegisters = 168;
constexpr int kMaxClusters = 72;  // a full Hopper chip has 144 SMs

// Direct stores are paced. A warpgroup takes this many clocks, times the tile's chunks of K, to
// store one pack per thread. So it stores a tile in three quarters of the time in which the other
// warpgroup multiplies one. (Without pacing, operations took up to 5 % longer: the stores fill the
// paths to memory that operands need.)
constexpr int kPaceClocksPerChunk = 24;

}  // namespace jax_intranode
