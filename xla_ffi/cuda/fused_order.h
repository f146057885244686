// In what order a fused collective matmul (fused_matmul.h) goes through its tiles, and where in
// rings they lie: for CUDA threads, and for host threads that test it. No CUDA.
//
// Of an operation P knows: whether it `sums`; its group's `rank` and `size`; of a shard how many
// row tiles an array has (`tiles_of_array`), and how many row tiles (`tiles`) and pairs of them
// (`pairs`) there are; how many `column_tiles`; how many pairs are multiplied with all columns
// before the next ones (`group_pairs`); items of a row tile, of the contracted dimension (`depth`).
#pragma once

#include "../kernels/memory.h"

namespace jax_intranode {

constexpr int kTileRows = 128;
constexpr int kTileDepth = 64;
constexpr int kClusterSize = 2;  // blocks, of which each has a row tile of a pair

JIN_FN constexpr int Smaller(int a, int b) { return a < b ? a : b; }
// Of a tile of products.
JIN_FN constexpr int ItemsOfTile(int columns) { return columns / kTileDepth; }

struct RowTile {
  int array, row;  // its first row
};
template <class P>
JIN_FN RowTile RowTileOf(const P& p, int tile) {
  const int array = tile / p.tiles_of_array;
  return {array, (tile - array * p.tiles_of_array) * kTileRows};
}

// A pair of row tiles of a shard and the columns that a cluster multiplies them with.
struct Unit {
  int step;  // which shard: see Owner
  int pair, column;
};
template <class P>
JIN_FN Unit UnitOf(const P& p, int number) {
  const int of_shard = p.pairs * p.column_tiles;
  const int step = number / of_shard;
  number -= step * of_shard;
  const int of_group = p.group_pairs * p.column_tiles;
  const int group = number / of_group;
  number -= group * of_group;
  const int first = group * p.group_pairs;
  const int pairs = Smaller(p.group_pairs, p.pairs - first);
  const int column = number / pairs;
  return {step, first + number - column * pairs, column};
}

// Items of a shard in the order in which they are multiplied.
struct Item {
  int step, tile, depth;
};
// That a rank sends, and that arrive there.
template <class P>
JIN_FN int Items(const P& p) {
  return (p.group.size - 1) * p.tiles * p.depth;
}
template <class P>
JIN_FN Item ItemOf(const P& p, int number) {
  const int of_shard = p.tiles * p.depth;
  const int step = number / of_shard;
  number -= step * of_shard;
  const int of_group = kClusterSize * p.group_pairs * p.depth;
  const int group = number / of_group;
  number -= group * of_group;
  const int first = kClusterSize * group * p.group_pairs;
  const int tiles = Smaller(kClusterSize * p.group_pairs, p.tiles - first);
  const int depth = number / tiles;
  return {step, first + number - depth * tiles, depth};
}

template <class P>
JIN_FN int RankAfter(const P& p, int step) {
  const int rank = p.group.rank + step;
  return rank >= p.group.size ? rank - p.group.size : rank;
}
// Of step s: whose rows are multiplied. Its own are the first of an all-gather, the last of a sum.
template <class P>
JIN_FN int Owner(const P& p, int step) {
  return RankAfter(p, p.sums ? step + 1 : step);
}

// Where this rank sends at a step: its shard at steps s >= 1, or products at steps that are not the
// last. Whose it was that came here at a step; of a sum, at which one a rank sent here.
template <class P>
JIN_FN int Receiver(const P& p, int step) {
  return RankAfter(p, p.sums ? step + 1 : p.group.size - step);
}
template <class P>
JIN_FN int Sender(const P& p, int step) {
  return RankAfter(p, p.sums ? p.group.size - 1 - step : step);
}
template <class P>
JIN_FN int StepOfSender(const P& p, int sender) {
  const int ahead = p.group.rank - sender - 1;
  return ahead < 0 ? ahead + p.group.size : ahead;
}

// Where in a ring, of those that arrive there, an item of what is sent at a step s >= 1 lies; or
// the first item of a tile of what is sent at a step s >= 0.
template <class P>
JIN_FN int PlaceOfItem(const P& p, int step, int tile, int depth) {
  return ((step - 1) * p.tiles + tile) * p.depth + depth;
}
template <int kColumns, class P>
JIN_FN int PlaceOfTile(const P& p, int step, int tile, int column) {
  return ((step * p.tiles + tile) * p.column_tiles + column) * ItemsOfTile(kColumns);
}

// Units whose products go to peers come first. They are drawn by lists, of which there is one for
// each cluster, or for each of them if they are fewer.
template <class P>
JIN_FN int Units(const P& p) {
  return p.group.size * p.pairs * p.column_tiles;
}
template <class P>
JIN_FN int UnitsSent(const P& p) {
  return p.sums ? Units(p) - p.pairs * p.column_tiles : 0;
}
template <class P>
JIN_FN int ListsOfSent(const P& p, int clusters) {
  return Smaller(clusters, UnitsSent(p));
}

// The units of a cluster, for each of its warps that goes through them. List n of those that are
// sent has unit n and each so many clusters after it; so do the lists of the others, which come
// next. A cluster goes through lists as it draws them, until it has gone through one of the latter.
// Block knows the operation (`p`), how many `Clusters()` there are, and the k-th `List(k)` that its
// cluster draws.
template <class Block>
class UnitsOfCluster {
 public:
  explicit JIN_FN UnitsOfCluster(const Block& b) : b_(b) {}

  // Goes to the next one, if there is one.
  JIN_FN bool Next() {
    if (lists_ > 0) number_ += b_.Clusters();
    while (lists_ == 0 || (of_sent_ && number_ >= UnitsSent(b_.p))) {
      number_ = b_.List(lists_++);
      const int lists_of_sent = ListsOfSent(b_.p, b_.Clusters());
      of_sent_ = number_ < lists_of_sent;
      if (!of_sent_) number_ += UnitsSent(b_.p) - lists_of_sent;
    }
    return number_ < Units(b_.p);
  }
  JIN_FN int number() const { return number_; }
  JIN_FN bool is_sent() const { return of_sent_; }
  JIN_FN int lists() const { return lists_; }
  // Whether there will be another list after this unit.
  JIN_FN bool NeedsList() const { return of_sent_ && number_ + b_.Clusters() >= UnitsSent(b_.p); }

 private:
  const Block& b_;
  int lists_ = 0, number_ = 0;
  bool of_sent_ = false;
};

}  // namespace jax_intranode
