// The producer warp of a block loads operands into shared memory, stage after stage, in the order
// in which the math warpgroups need them. It waits for chunks that peers send (fused_send.cuh says
// when a flag means that a chunk has arrived).
//
// A stage is free when the math warpgroups of both blocks of the cluster have released it: each
// block loads half of the right operand, which both need, into the shared memory of both.
#pragma once

#include "fused_layout.cuh"

namespace jax_intranode {
namespace {

// Waits for flags. All threads of a warp call these functions; each lane looks at one flag.

// Waits until chunk k of the `count` chunks from a slot on has arrived. Returns how many of the
// `count` chunks have arrived without a gap.
template <int kColumns>
JIN_FN int AwaitChunks(const Block<kColumns>& b, int slot, int k, int count, int of_rank) {
  DeviceThread thread = b.Thread();
  const int lane = threadIdx.x & 31;
  for (;;) {
    const uint32_t missing =
        ~__ballot_sync(~0u, k + lane >= count || b.HasArrived(slot + k + lane));
    const int arrived = k + (missing == 0 ? 32 : __ffs(missing) - 1);
    if (arrived > k) {
      __syncwarp();
      ProxyFence();
      return arrived;
    }
    b.Wait(thread, of_rank);
  }
}

// Waits until the chunks of a column tile of weight gradients have arrived for row tile `tile`,
// counted over all shards in the order of steps. Returns the end of the row tiles for which they
// have arrived.
template <int kColumns>
JIN_FN int AwaitColumns(const Block<kColumns>& b, int tile, int column) {
  DeviceThread thread = b.Thread();
  constexpr int kChunks = TileConfig<kColumns>::kChunks;
  constexpr int kTiles = 32 / kChunks;
  const FusedParams& p = b.p;
  const int lane = threadIdx.x & 31;
  const int of_lane = tile + lane / kChunks;
  const int step = of_lane / p.row_tiles;
  const int k = column * kChunks + lane % kChunks;
  const int slot = SlotOfChunk(p, step, of_lane - step * p.row_tiles, k);
  const bool awaits = lane / kChunks < kTiles && step < p.size && k < p.k_chunks;
  for (;;) {
    const uint32_t missing = ~__ballot_sync(~0u, !awaits || b.HasArrived(slot));
    const int arrived = missing == 0 ? kTiles : (__ffs(missing) - 1) / kChunks;
    if (arrived > 0) {
      __syncwarp();
      ProxyFence();
      return tile + arrived;
    }
    b.Wait(thread, RankAfter(p, tile / p.row_tiles));
  }
}

template <Layout kLayout, bool kWgrad, int kColumns>
class Feeder {
 public:
  explicit JIN_FN Feeder(const Block<kColumns>& b) : b_(b), p_(b.p), side_(RankInCluster()) {}

  JIN_FN void Run() {
    ClusterTileLoop<Block<kColumns>> tiles(b_);
    while (tiles.Next()) {
      // The next list is claimed early, while the math warpgroups still multiply this tile.
      if (tiles.NeedsList() && threadIdx.x == 0 && side_ == 0) {
        AnnounceList(b_, tiles.lists(), ClaimList(p_));
      }
      __syncwarp();
      const ClusterTile tile = ClusterTileOf(p_, tiles.number());
      if (kWgrad && tile.wgrad) {
        FeedWgrad(tile);
      } else {
        FeedProduct(tile);
      }
    }
  }

 private:
  using Config = TileConfig<kColumns>;

  // Loads the operands of a tile of products: rows of a shard and columns of w, chunk after chunk
  // of K. In a reduce-scatter one term follows the other.
  JIN_FN void FeedProduct(const ClusterTile& tile) {
    // An N-major w is loaded in whole chunks: the last one may be wider than the tile.
    constexpr uint32_t kExact = kColumns * kTileDepth * 2;
    const bool n_major = IsNMajor<kLayout>(p_);
    const uint32_t right_bytes = n_major ? Config::kRightBytes : kExact;
    const int row_tile = kClusterSize * tile.row_pair + side_;
    const bool real = row_tile < p_.row_tiles;  // the last row pair may have one row tile only
    const RowTile rows = RowTileOf(p_, row_tile);
    const int owner = Owner(p_, tile.step);
    const bool arrives = !p_.reduce_scatter && tile.step > 0;
    const int array = p_.reduce_scatter ? rows.array * p_.size + owner : rows.array;
    const int slot = SlotOfChunk(p_, tile.step, row_tile, 0);
    const MatrixParams* matrix = &MatrixOf(p_, tile.column);
    const int column = (tile.column - matrix->first_tile) * kColumns;
    int arrived = arrives ? 0 : p_.k_chunks;
    int first = 0;  // chunk of the term that is loaded now
    for (int k = 0; k < p_.k_chunks; ++k) {
      if (k == matrix->k_end) {
        first = k;
        ++matrix;
      }
      const int at = (k - first) * kTileDepth;
      if (real && k >= arrived) arrived = AwaitChunks(b_, slot, k, p_.k_chunks, owner);
      if (Elected()) {
        const uint32_t full = b_.Full(stage_), left = b_.Left(stage_), right = b_.Right(stage_);
        BarrierWait(b_.Empty(stage_), parity_);
        BarrierExpect(full, right_bytes + (real ? kChunk : 0));
        if (real && arrives) {
          Load(left, SlotData(p_, p_.rank, slot + k), kChunk, full);
        } else if (real) {
          Load(left, matrix->x, at, rows.row, array, full);
          Load(left + kHalfChunk, matrix->x, at, rows.row + kHalfRows, array, full);
        }
        if (n_major) {
          JIN_UNROLL
          for (int n = 0; n < kColumns; n += 64) {
            LoadToBoth(right + n * kTileDepth * 2 + side_ * 4096, matrix->w, column + n,
                       at + side_ * 32, full);
          }
        } else {
          LoadToBoth(right + side_ * (kExact / 2), matrix->w, at, column + side_ * (kColumns / 2),
                     full);
        }
      }
      Advance();
    }
  }

  // Loads the operands of a tile of a weight gradient: 128 columns of wgrad_lhs, which differ
  // between the blocks of the cluster, and the columns of x. Both are contracted along the rows of
  // all shards, half a row tile at a time. The loops contain no division: stages follow each other
  // too fast for one.
  JIN_FN void FeedWgrad(const ClusterTile& tile) {
    const int row_tile = kClusterSize * tile.row_pair + side_;
    const bool real = row_tile < p_.wgrad_row_tiles;  // as above
    const WgradParams& wgrad = WgradOf(p_, tile.column);
    const int first_chunk = (tile.column - wgrad.first_tile) * Config::kChunks;
    int arrived = 0;  // row tiles of all shards
    for (int step = 0; step < p_.size; ++step) {
      const bool arrives = !p_.reduce_scatter && step > 0;
      const int rank = p_.reduce_scatter ? step : RankAfter(p_, step);
      const char* chunk = SlotData(p_, p_.rank, SlotOfChunk(p_, step, 0, first_chunk));
      RowTile rows = {0, 0};
      for (int at = 0; at < p_.row_tiles; ++at) {
        if (arrives && step * p_.row_tiles + at >= arrived) {
          arrived = AwaitColumns(b_, step * p_.row_tiles + at, tile.column);
        }
        for (int half = 0; half < 2; ++half) {
          if (Elected()) {
            const int row = rows.row + half * kHalfRows;
            const int array = rows.array * p_.size + rank;
            const uint32_t full = b_.Full(stage_), left = b_.Left(stage_);
            BarrierWait(b_.Empty(stage_), parity_);
            BarrierExpect(full, real ? Config::kStageBytes : Config::kRightBytes);
            if (real) {
              Load(left, p_.wgrad_lhs, row_tile * kTileRows, row, array, full);
              Load(left + kHalfChunk, p_.wgrad_lhs, row_tile * kTileRows + 64, row, array, full);
            }
            const uint32_t right = b_.Right(stage_) + side_ * (kHalfChunk / 2);
            JIN_UNROLL
            for (int i = 0; i < Config::kChunks; ++i) {
              if (arrives) {
                // Past the end of x the last chunk is loaded again; its products are not stored.
                LoadToBoth(right + i * kHalfChunk,
                           chunk + Min(i, p_.k_chunks - 1 - first_chunk) * int64_t{kChunk} +
                               half * kHalfChunk + side_ * (kHalfChunk / 2),
                           kHalfChunk / 2, full);
              } else {
                LoadToBoth(right + i * kHalfChunk, wgrad.x, (first_chunk + i) * 64,
                           row + side_ * (kHalfRows / 2), p_.reduce_scatter ? array : rows.array,
                           full);
              }
            }
          }
          Advance();
        }
        chunk += p_.k_chunks * int64_t{kChunk};
        rows.row += kTileRows;
        if (rows.row == p_.row_tiles_per_array * kTileRows) rows = {rows.array + 1, 0};
      }
    }
  }

  JIN_FN void Advance() {
    if (++stage_ == Config::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  const Block<kColumns>& b_;
  const FusedParams& p_;
  const uint32_t side_;  // which block of the cluster this is
  int stage_ = 0;        // the stage that is filled next
  uint32_t parity_ = 1;  // of that stage's barrier
};

}  // namespace
}  // namespace jax_intranode
