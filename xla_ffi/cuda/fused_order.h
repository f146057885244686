// In what order a fused collective matmul (fused_matmul.h) goes through its tiles, and where in
// rings they lie: for CUDA threads, and for host threads that test it. No CUDA.
//
// Of an operation P knows: whether it `sums`; its group's `rank` and `size`; of a shard how many
// row tiles an array has (`tiles_of_array`), and how many row tiles (`tiles`) and pairs of them
// (`pairs`) there are; how many `column_tiles`; how many pairs are multiplied with all columns
// before the next ones (`group_pairs`), and how many where these don't come out even
// (`fewer_pairs`; in an all-gather `fewer_sent_pairs` of those that are sent, and
// `fewer_pairs_after` of those after matmuls beside it); items of a row tile, of all contracted
// dimensions (`depth`); for a sum, how many of a shard's units are a `part`; of the matmuls beside
// it (see IsBeside) how many `beside_pairs` of row tiles and `beside_columns`, of tiles, there are;
// and in an all-gather how many pairs that arrive come before them (`pairs_before`; without them
// all), and how many of their units after the rest of these pairs (`beside_after`).
#pragma once

#include "../kernels/memory.h"
#include "matmul_limits.h"

namespace jax_intranode {

JIN_FN constexpr int Smaller(int a, int b) { return a < b ? a : b; }
// Of a tile of products, of which the last one may have columns of the one before, too.
JIN_FN constexpr int ItemsOfTile(int columns) { return (columns + kTileDepth - 1) / kTileDepth; }

struct RowTile {
  int array, row;  // its first row
};
template <class P>
JIN_FN RowTile RowTileOf(const P& p, int tile) {
  const int array = tile / p.tiles_of_array;
  return {array, (tile - array * p.tiles_of_array) * kTileRows};
}

// Pairs of row tiles are gone through in groups: of an all-gather those of all shards, of a sum
// those of each shard for itself. Where the groups don't come out even it is the first one that has
// fewer, so that as much as possible is multiplied at once at the end.
struct PairGroup {
  int first, pairs;
};
// Sets what P knows of groups that have fewer. Without matmuls beside it all pairs come before
// them. On the host.
template <class P>
void CutGroups(P* p) {
  const int others = (p->group.size - 1) * p->pairs;
  if (p->beside_pairs == 0) p->pairs_before = others;
  p->fewer_pairs = (p->sums ? p->pairs : p->pairs + p->pairs_before) % p->group_pairs;
  p->fewer_sent_pairs = p->pairs_before % p->group_pairs;
  p->fewer_pairs_after = (others - p->pairs_before) % p->group_pairs;
}
// The group of a number, of which each pair has `each`; the first group has `fewer` pairs, or there
// is none such. The number is counted from the group's first one then.
JIN_FN PairGroup GroupOf(int fewer, int group_pairs, int each, int* number) {
  if (*number < fewer * each) return {0, fewer};
  *number -= fewer * each;
  const int group = *number / (group_pairs * each);
  *number -= group * group_pairs * each;
  return {fewer + group * group_pairs, group_pairs};
}

// Of an all-gather the pairs that arrive, by their number: shard after shard. But among many ranks
// the first one of each shard, then the next one of each, so that a rank sends to all peers at a
// time, and gets from all: shard after shard, ranks that are not quite in step send to the same one
// at times, which keeps what they send to others waiting, too. Four keep in step.
struct ShardPair {
  int step, pair;
};
template <class P>
JIN_FN ShardPair ArrivingPair(const P& p, int number) {
  const int shards = p.group.size - 1;
  if (p.group.size > kMostInStep) return {number % shards + 1, number / shards};
  return {number / p.pairs + 1, number % p.pairs};
}

// Units: see below. Those whose products go to peers come first.
template <class P>
JIN_FN int UnitsOfShard(const P& p) {
  return p.pairs * p.column_tiles;
}
template <class P>
JIN_FN int UnitsSent(const P& p) {
  return p.sums ? (p.group.size - 1) * UnitsOfShard(p) : 0;
}
template <class P>
JIN_FN int UnitsBeside(const P& p) {
  return p.beside_pairs * p.beside_columns;
}
template <class P>
JIN_FN int Units(const P& p) {
  return p.group.size * UnitsOfShard(p) + UnitsBeside(p);
}

// Matmuls beside a collective one: derivatives by matrices, whose units fill the time in which the
// links decide. Of a sum they come after all that is sent, before those that wait for peers. Of an
// all-gather they contract all that is gathered along its rows, and need some columns of all. So of
// the pairs that arrive only some are sent as without them, and multiplied before them; of the
// others, which are multiplied after them, the first columns of all are sent before the next ones.
// Some of them may come after these others: a unit of what arrives takes long where K is large, and
// would leave most of the GPU idle if it came last. Earlier, it is multiplied as columns arrive.
template <class P>
JIN_FN int UnitsBefore(const P& p) {
  return p.sums ? UnitsSent(p) : (p.pairs + p.pairs_before) * p.column_tiles;
}
// Stages of one: what it multiplies at a time is half a row tile, of all shards.
template <class P>
JIN_FN int StagesBeside(const P& p) {
  return 2 * p.tiles * p.group.size;
}
// Units of those others, of what arrives.
template <class P>
JIN_FN int UnitsBetween(const P& p) {
  return p.sums ? 0 : ((p.group.size - 1) * p.pairs - p.pairs_before) * p.column_tiles;
}
// Which of them a unit is; or a negative number, or one that there is not.
template <class P>
JIN_FN int NumberBeside(const P& p, int number) {
  number -= UnitsBefore(p);
  const int first = UnitsBeside(p) - p.beside_after;
  if (number < first) return number;
  const int after = number - UnitsBetween(p);
  return after < first ? -1 : after;
}
template <class P>
JIN_FN bool IsBeside(const P& p, int number) {
  const int beside = NumberBeside(p, number);
  return beside >= 0 && beside < UnitsBeside(p);
}

// A pair of row tiles of a shard and the columns that a cluster multiplies them with: of a group
// the first columns of all pairs, then the next ones. Of a sum first a part of each shard that is
// sent, then the next part of each: then an owner has all products of some tiles early, and need
// not sum all of them at the end.
struct Unit {
  int step;  // which shard: see Owner
  int pair, column;
  bool beside = false;  // then of no shard, and of the rows and columns of a derivative
};
template <class P>
JIN_FN Unit UnitOf(const P& p, int number) {
  if (IsBeside(p, number)) {
    number = NumberBeside(p, number);
    // Of a sum in groups, as others; of an all-gather columns in the order in which they arrive.
    const int pairs = p.sums ? p.group_pairs : p.beside_pairs;
    const PairGroup group = GroupOf(p.beside_pairs % pairs, pairs, p.beside_columns, &number);
    const int column = number / group.pairs;
    return {0, group.first + number - column * group.pairs, column, true};
  }
  int first = 0, fewer = p.fewer_pairs;
  if (number >= UnitsBefore(p)) {
    number -= UnitsBeside(p) - p.beside_after;
    if (!p.sums) {
      number -= UnitsBefore(p);
      first = p.pairs + p.pairs_before;
      fewer = p.fewer_pairs_after;
    }
  }
  int step = 0;
  if (p.sums && number >= UnitsSent(p)) {
    number -= UnitsSent(p);
    step = p.group.size - 1;
  } else if (p.sums) {
    const int steps = p.group.size - 1;
    const int before = number / (p.part * steps) * p.part;
    const int units = Smaller(p.part, UnitsOfShard(p) - before);
    number -= before * steps;
    step = number / units;
    number += before - step * units;
  }
  const PairGroup group = GroupOf(fewer, p.group_pairs, p.column_tiles, &number);
  const int column = number / group.pairs;
  const int pair = first + group.first + number - column * group.pairs;
  if (p.sums || pair < p.pairs) return {step, pair, column};
  const ShardPair arriving = ArrivingPair(p, pair - p.pairs);
  return {arriving.step, arriving.pair, column};
}

// Items that a rank sends in an all-gather, and that arrive there, in the order in which they are
// multiplied: of a group those of all tiles at the first depth, then at the next one. The last pair
// of a shard may have one tile only: then there are no items with the other one's number.
struct Item {
  int step, tile, depth;
};
template <class P>
JIN_FN int Items(const P& p) {
  return (p.group.size - 1) * p.pairs * kClusterSize * p.depth;
}
template <class P>
JIN_FN Item ItemOf(const P& p, int number) {
  const int of_pair = kClusterSize * p.depth;
  PairGroup group;
  if (number < p.pairs_before * of_pair) {
    group = GroupOf(p.fewer_sent_pairs, p.group_pairs, of_pair, &number);
  } else {  // one group
    number -= p.pairs_before * of_pair;
    group = {p.pairs_before, (p.group.size - 1) * p.pairs - p.pairs_before};
  }
  const int tiles = kClusterSize * group.pairs;
  const int depth = number / tiles;
  const int tile = kClusterSize * group.first + number - depth * tiles;
  const ShardPair pair = ArrivingPair(p, tile / kClusterSize);
  return {pair.step, kClusterSize * pair.pair + tile % kClusterSize, depth};
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

// Units are drawn by lists, of which there is one for each cluster; and as many of those that are
// sent, or one for each of these if they are fewer.
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
