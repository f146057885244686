// The order in which a fused collective matmul (fused_matmul.h) computes its tiles, and where its
// chunks lie in ring buffers. The kernel and a host test share this file. No CUDA.
//
// The rows of x that belong to one rank are a shard. A shard is divided into row tiles of kTileRows
// rows. Two adjacent row tiles are a row pair. The columns of all products are divided into column
// tiles. A cluster of two blocks computes one cluster tile at a time: a row pair times a column
// tile. Cluster tiles are numbered in the order in which they are computed. Chunks that a rank
// sends in an all-gather are numbered in the order in which they are sent. The functions below map
// these numbers to tiles and chunks.
#pragma once

#include "../kernels/memory.h"
#include "matmul_limits.h"

namespace jax_intranode {

// All that the order depends on. Only `rank` differs between the ranks of a group.
struct TileOrder {
  int rank, size;  // this rank, and the number of ranks of its group

  int k_chunks;             // chunks of a row tile of x: of all terms, each with its own last chunk
  int row_tiles_per_array;  // x is [outer, rows, K]: row tiles of one outer index of a shard
  int row_tiles;            // of a shard
  int row_pairs;            // of a shard; the last one may have one row tile only
  int column_tiles;         // of all products

  // Row pairs of a band, and of the first band where row pairs don't divide evenly (0: they do). An
  // all-gather has up to three runs of row pairs, each with bands of its own: see SetShortBands.
  int band_pairs;
  int short_band, short_sent_band, short_band_after_wgrad;

  int part_tiles;  // reduce-scatter: cluster tiles of a shard that make a part

  // Weight gradients, if the kernel computes them, of all matrices together. See IsWgrad.
  int wgrad_row_pairs, wgrad_column_tiles;
  int row_pairs_before_wgrad;  // all-gather: arriving row pairs multiplied before them
  int wgrad_tiles_last;        // all-gather: their cluster tiles computed after all other tiles

  bool reduce_scatter;  // matmul + reduce-scatter, not all-gather + matmul
};

JIN_FN constexpr int Min(int a, int b) { return a < b ? a : b; }

// Chunks of a tile of products. If the columns are not a multiple of a chunk's, the last chunk
// overlaps the one before it.
JIN_FN constexpr int ChunksOfTile(int columns) { return (columns + kTileDepth - 1) / kTileDepth; }

struct RowTile {
  int array, row;  // its outer index, and its first row there
};
JIN_FN RowTile RowTileOf(const TileOrder& p, int tile) {
  const int array = tile / p.row_tiles_per_array;
  return {array, (tile - array * p.row_tiles_per_array) * kTileRows};
}

// Bands. A reduce-scatter divides the row pairs of each shard into bands. An all-gather divides the
// row pairs of all shards together. If they don't divide evenly, the first band is the short one:
// then as many tiles as possible are computed at the same time at the end.
struct Band {
  int first, pairs;
};

// Sets the sizes of short bands. An all-gather has three runs of row pairs: those multiplied before
// the weight gradients, which are the rank's own and some arriving ones; the arriving ones among
// these, for the order in which chunks are sent; and those multiplied after the weight gradients.
// Without weight gradients all row pairs are multiplied "before" them. Host only.
inline void SetShortBands(TileOrder* p) {
  const int arriving = (p->size - 1) * p->row_pairs;
  if (p->wgrad_row_pairs == 0) p->row_pairs_before_wgrad = arriving;
  p->short_band =
      (p->reduce_scatter ? p->row_pairs : p->row_pairs + p->row_pairs_before_wgrad) % p->band_pairs;
  p->short_sent_band = p->row_pairs_before_wgrad % p->band_pairs;
  p->short_band_after_wgrad = (arriving - p->row_pairs_before_wgrad) % p->band_pairs;
}

// The band that `number` lies in, where each row pair has `per_pair` numbers and the first band has
// `short_band` pairs if that is not 0. Then counts the number from the start of the band.
JIN_FN Band BandOf(int short_band, int band_pairs, int per_pair, int* number) {
  if (*number < short_band * per_pair) return {0, short_band};
  *number -= short_band * per_pair;
  const int band = *number / (band_pairs * per_pair);
  *number -= band * band_pairs * per_pair;
  return {short_band + band * band_pairs, band_pairs};
}

// The arriving row pairs of an all-gather, in order. Up to kMostInStep ranks: one shard after the
// other. More ranks: the first row pair of each shard, then the second one of each, and so on.
// Then a rank sends to all peers and receives from all peers at the same time. With shard after
// shard, ranks that are slightly out of step send to the same receiver at times, and delay what
// they send to others.
struct ShardPair {
  int step, row_pair;
};
JIN_FN ShardPair ArrivingPair(const TileOrder& p, int number) {
  const int shards = p.size - 1;
  if (p.size > kMostInStep) return {number % shards + 1, number / shards};
  return {number / p.row_pairs + 1, number % p.row_pairs};
}

// Numbers of cluster tiles. Those whose products go to peers come first.
JIN_FN int ClusterTilesOfShard(const TileOrder& p) { return p.row_pairs * p.column_tiles; }
JIN_FN int ClusterTilesSent(const TileOrder& p) {
  return p.reduce_scatter ? (p.size - 1) * ClusterTilesOfShard(p) : 0;
}
JIN_FN int WgradTiles(const TileOrder& p) { return p.wgrad_row_pairs * p.wgrad_column_tiles; }
JIN_FN int ClusterTiles(const TileOrder& p) {
  return p.size * ClusterTilesOfShard(p) + WgradTiles(p);
}

// Weight gradients fill the time in which the kernel would wait for the links.
//   reduce-scatter  They come after all tiles that are sent, and before the tiles of the rank's own
//                   rows, which wait for peers.
//   all-gather      They contract all gathered rows, so they need some columns of all shards.
//                   `row_pairs_before_wgrad` arriving row pairs are sent and multiplied as without
//                   weight gradients. The other arriving row pairs form one band: the first columns
//                   of all of them are sent before the next columns. They are multiplied after the
//                   weight gradients. `wgrad_tiles_last` tiles of the weight gradients come after
//                   them: where K is large a tile of the product takes long, and would leave most
//                   of the GPU idle if it came last. The other weight gradients are computed as
//                   columns arrive.

// Cluster tiles before the first weight gradient.
JIN_FN int TilesBeforeWgrad(const TileOrder& p) {
  return p.reduce_scatter ? ClusterTilesSent(p)
                          : (p.row_pairs + p.row_pairs_before_wgrad) * p.column_tiles;
}
// All-gather: cluster tiles between the first weight gradients and the last ones.
JIN_FN int TilesAmidWgrad(const TileOrder& p) {
  return p.reduce_scatter
             ? 0
             : ((p.size - 1) * p.row_pairs - p.row_pairs_before_wgrad) * p.column_tiles;
}
// The number of a cluster tile among those of weight gradients. Out of their range for others.
JIN_FN int WgradNumber(const TileOrder& p, int number) {
  number -= TilesBeforeWgrad(p);
  const int first = WgradTiles(p) - p.wgrad_tiles_last;
  if (number < first) return number;
  const int after = number - TilesAmidWgrad(p);
  return after < first ? -1 : after;
}
JIN_FN bool IsWgrad(const TileOrder& p, int number) {
  const int wgrad = WgradNumber(p, number);
  return wgrad >= 0 && wgrad < WgradTiles(p);
}
// Pipeline stages of a tile of weight gradients: each takes half a row tile of a shard.
JIN_FN int WgradStages(const TileOrder& p) { return 2 * p.row_tiles * p.size; }

// Within a band the first columns of all row pairs are computed before the next columns. A
// reduce-scatter computes the first part of each peer's shard, then the second part of each. So an
// owner has all products of some tiles early, and need not add up all tiles at the end.
struct ClusterTile {
  int step;  // which shard: see Owner
  int row_pair, column;
  bool wgrad = false;  // then rows and columns are those of weight gradients, and there is no shard
};
JIN_FN ClusterTile ClusterTileOf(const TileOrder& p, int number) {
  if (IsWgrad(p, number)) {
    number = WgradNumber(p, number);
    // All-gather: one band, so that columns come in the order in which they arrive.
    const int pairs = p.reduce_scatter ? p.band_pairs : p.wgrad_row_pairs;
    const Band band = BandOf(p.wgrad_row_pairs % pairs, pairs, p.wgrad_column_tiles, &number);
    const int column = number / band.pairs;
    return {0, band.first + number - column * band.pairs, column, true};
  }
  int first = 0, short_band = p.short_band;
  if (number >= TilesBeforeWgrad(p)) {
    number -= WgradTiles(p) - p.wgrad_tiles_last;
    if (!p.reduce_scatter) {
      number -= TilesBeforeWgrad(p);
      first = p.row_pairs + p.row_pairs_before_wgrad;
      short_band = p.short_band_after_wgrad;
    }
  }
  int step = 0;
  if (p.reduce_scatter && number >= ClusterTilesSent(p)) {
    number -= ClusterTilesSent(p);
    step = p.size - 1;
  } else if (p.reduce_scatter) {
    const int steps = p.size - 1;
    const int before = number / (p.part_tiles * steps) * p.part_tiles;
    const int tiles = Min(p.part_tiles, ClusterTilesOfShard(p) - before);
    number -= before * steps;
    step = number / tiles;
    number += before - step * tiles;
  }
  const Band band = BandOf(short_band, p.band_pairs, p.column_tiles, &number);
  const int column = number / band.pairs;
  const int row_pair = first + band.first + number - column * band.pairs;
  if (p.reduce_scatter || row_pair < p.row_pairs) return {step, row_pair, column};
  const ShardPair arriving = ArrivingPair(p, row_pair - p.row_pairs);
  return {arriving.step, arriving.row_pair, column};
}

// Chunks that a rank sends in an all-gather, in the order in which the receiver multiplies them:
// within a band, the first chunk of each row tile, then the second chunk of each, and so on. If the
// last row pair of a shard has one row tile only, the numbers of the other row tile's chunks stand
// for no chunk.
struct Chunk {
  int step, row_tile, k;
};
JIN_FN int ChunksSent(const TileOrder& p) {
  return (p.size - 1) * p.row_pairs * kClusterSize * p.k_chunks;
}
JIN_FN Chunk ChunkOf(const TileOrder& p, int number) {
  const int per_pair = kClusterSize * p.k_chunks;
  Band band;
  if (number < p.row_pairs_before_wgrad * per_pair) {
    band = BandOf(p.short_sent_band, p.band_pairs, per_pair, &number);
  } else {  // one band
    number -= p.row_pairs_before_wgrad * per_pair;
    band = {p.row_pairs_before_wgrad, (p.size - 1) * p.row_pairs - p.row_pairs_before_wgrad};
  }
  const int tiles = kClusterSize * band.pairs;
  const int k = number / tiles;
  const int tile = kClusterSize * band.first + number - k * tiles;
  const ShardPair pair = ArrivingPair(p, tile / kClusterSize);
  return {pair.step, kClusterSize * pair.row_pair + tile % kClusterSize, k};
}

// Steps. At step s a rank multiplies the shard of the rank `Owner`. Its own shard is the first one
// of an all-gather and the last one of a reduce-scatter.
JIN_FN int RankAfter(const TileOrder& p, int step) {
  const int rank = p.rank + step;
  return rank >= p.size ? rank - p.size : rank;
}
JIN_FN int Owner(const TileOrder& p, int step) {
  return RankAfter(p, p.reduce_scatter ? step + 1 : step);
}
// The rank to which this rank sends at a step. An all-gather sends the shard at each step s >= 1. A
// reduce-scatter sends products at each step but the last one.
JIN_FN int Receiver(const TileOrder& p, int step) {
  return RankAfter(p, p.reduce_scatter ? step + 1 : p.size - step);
}
// The rank from which this rank receives at a step.
JIN_FN int Sender(const TileOrder& p, int step) {
  return RankAfter(p, p.reduce_scatter ? p.size - 1 - step : step);
}
// Reduce-scatter: the step at which a rank sends to this one.
JIN_FN int StepOfSender(const TileOrder& p, int sender) {
  const int ahead = p.rank - sender - 1;
  return ahead < 0 ? ahead + p.size : ahead;
}

// Slots of the receiver's ring. All-gather: the slot of a chunk that is sent at a step s >= 1.
JIN_FN int SlotOfChunk(const TileOrder& p, int step, int row_tile, int k) {
  return ((step - 1) * p.row_tiles + row_tile) * p.k_chunks + k;
}
// Reduce-scatter: the slot of the first chunk of a tile that is sent at a step s >= 0.
template <int kColumns>
JIN_FN int SlotOfTile(const TileOrder& p, int step, int row_tile, int column) {
  return ((step * p.row_tiles + row_tile) * p.column_tiles + column) * ChunksOfTile(kColumns);
}

// Clusters claim work lists, of two kinds. Lists of tiles that are not sent: one for each cluster.
// Lists of tiles that are sent: as many, but no more than there are such tiles.
JIN_FN int SentLists(const TileOrder& p, int clusters) {
  return Min(clusters, ClusterTilesSent(p));
}

// Goes through the cluster tiles of a cluster. Each of its warps has one of these. List n holds
// cluster tile n and every `Clusters()`-th one after it; the lists of tiles that are sent come
// first, then the others are counted from the first tile that is not sent. A cluster claims list
// after list until it has finished a list of tiles that are not sent.
//
// Block knows the operation (`p`), the number of clusters (`Clusters()`), and the k-th list that
// its cluster claims (`List(k)`).
template <class Block>
class ClusterTileLoop {
 public:
  explicit JIN_FN ClusterTileLoop(const Block& block) : block_(block) {}

  // Goes to the next tile. False if there is none.
  JIN_FN bool Next() {
    if (lists_ > 0) number_ += block_.Clusters();
    while (lists_ == 0 || (is_sent_ && number_ >= ClusterTilesSent(block_.p))) {
      number_ = block_.List(lists_++);
      const int sent_lists = SentLists(block_.p, block_.Clusters());
      is_sent_ = number_ < sent_lists;
      if (!is_sent_) number_ += ClusterTilesSent(block_.p) - sent_lists;
    }
    return number_ < ClusterTiles(block_.p);
  }
  JIN_FN int number() const { return number_; }
  // Whether the tile's products go to a peer.
  JIN_FN bool is_sent() const { return is_sent_; }
  // Lists that the cluster has begun.
  JIN_FN int lists() const { return lists_; }
  // Whether this tile is the last one of its list and another list follows.
  JIN_FN bool NeedsList() const {
    return is_sent_ && number_ + block_.Clusters() >= ClusterTilesSent(block_.p);
  }

 private:
  const Block& block_;
  int lists_ = 0, number_ = 0;
  bool is_sent_ = false;
};

}  // namespace jax_intranode
