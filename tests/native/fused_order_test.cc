// The order of a fused collective matmul, and the places in rings: of all ranks, of operations of
// all kinds of sizes, with blocks that run in any number and order. First as the kernel is, then
// with one thing changed, which has to be found.
#include "xla_ffi/cuda/fused_order.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace {

using namespace jax_intranode;

constexpr int kColumns = 192;

// Of the one that runs: as it is; work dealt out to clusters in place of drawn; products sent as if
// it were another step; items of a tile that come before those of the next tile; units of an
// all-gather so by their pairs; items of eight ranks one shard after the other; units of a sum step
// after step, not in parts; matmuls beside it after all others, or none of them after others; items
// as if nothing were beside it.
enum class Variant {
  kSound,
  kDealt,
  kOtherStep,
  kTileByTile,
  kPairByPair,
  kShardByShard,
  kStepByStep,
  kBesideLast,
  kAllBesideFirst,
  kRowsFirst
} variant;
int wrong;

void Expect(bool right, const char* what) {
  if (!right && ++wrong <= 5 && variant == Variant::kSound) std::printf("wrong: %s\n", what);
}

struct Operation {
  bool sums;
  int tiles_of_array, tiles, pairs, column_tiles, depth, part;
  int group_pairs, fewer_pairs, fewer_sent_pairs, fewer_pairs_after;
  int beside_pairs, beside_columns, pairs_before, beside_after;
  struct {
    int rank, size;
  } group;
};

// Lists that clusters of a rank have drawn.
struct Lists {
  const Operation& p;
  int clusters;
  int drawn = 0;
};

struct Cluster {
  const Operation& p;
  Lists* lists;
  int own;  // its number
  mutable std::vector<int> got = {};

  int Clusters() const { return lists->clusters; }
  int List(int k) const {
    while (static_cast<int>(got.size()) <= k) {
      // Dealt out, a cluster has its own list of each kind and no other.
      const bool dealt = variant == Variant::kDealt;
      const int first = ListsOfSent(p, lists->clusters);
      got.push_back(!dealt ? lists->drawn++ : got.empty() && own < first ? own : first + own);
    }
    return got[k];
  }
};

// Each unit is done once, and what peers wait for by the clusters that run, before they wait.
void CheckUnits(const Operation& p, int clusters, std::mt19937* random) {
  std::vector<int> order(clusters);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), *random);
  // These run from the start, a unit each in any order; the others when all of these have ended.
  const int running = 1 + static_cast<int>((*random)() % clusters);
  Lists lists{p, clusters};
  std::vector<Cluster> all;
  for (const int own : order) all.push_back(Cluster{p, &lists, own});
  std::vector<UnitsOfCluster<Cluster>> units;
  for (const Cluster& cluster : all) units.emplace_back(cluster);
  std::vector<int> done(Units(p), 0);
  std::vector<bool> own_step(clusters, false);
  int sent = 0;
  for (int first = 0, last = running; first < clusters; first = last, last = clusters) {
    std::vector<int> at;
    for (int i = first; i < last; ++i) at.push_back(i);
    while (!at.empty()) {
      const size_t k = (*random)() % at.size();
      const int i = at[k];
      if (!units[i].Next()) {
        at.erase(at.begin() + k);
        continue;
      }
      const int number = units[i].number();
      Expect(number >= 0 && number < Units(p), "a unit that there is not");
      if (number < 0 || number >= Units(p)) return;
      ++done[number];
      const Unit unit = UnitOf(p, number);
      const bool is_sent = p.sums && !unit.beside && unit.step < p.group.size - 1;
      Expect(is_sent == units[i].is_sent(), "is_sent is not as the unit's step");
      if (is_sent) Expect(!own_step[i], "a unit for a peer after one that waits for peers");
      own_step[i] = own_step[i] || !is_sent;
      sent += is_sent;
    }
    if (first == 0)
      Expect(sent == UnitsSent(p), "units for peers left to clusters that do not run");
  }
  Expect(std::all_of(done.begin(), done.end(), [](int n) { return n == 1; }),
         "a unit not done once");
  if (variant != Variant::kDealt) {
    Expect(lists.drawn == ListsOfSent(p, clusters) + clusters, "more lists drawn than there are");
  }
}

Unit UnitAt(const Operation& p, int number) {
  if (variant == Variant::kBesideLast && number >= UnitsBefore(p)) {
    Operation as = p;
    as.beside_after = 0;
    const int after = Units(p) - UnitsBefore(p) - UnitsBeside(p);
    const int moved = number - UnitsBefore(p);
    return UnitOf(as, number + (moved < after ? UnitsBeside(p) : -after));
  }
  if (variant == Variant::kAllBesideFirst) {
    Operation as = p;
    as.beside_after = 0;
    return UnitOf(as, number);
  }
  const int pair = number / p.column_tiles;
  if (variant == Variant::kPairByPair && !p.sums && p.beside_pairs == 0) {
    return {pair / p.pairs, pair % p.pairs, number % p.column_tiles};
  }
  Operation as = p;
  if (variant == Variant::kStepByStep) as.part = p.pairs * p.column_tiles;
  return UnitOf(as, number);
}
Item ItemAt(const Operation& p, int number) {
  if (variant == Variant::kRowsFirst) {
    Operation as = p;
    as.beside_pairs = 0;
    CutGroups(&as);
    return ItemOf(as, number);
  }
  if (variant == Variant::kShardByShard && p.group.size == 8 && p.beside_pairs == 0) {
    Operation as = p;  // of two ranks that have as many pairs
    as.group.size = 2;
    as.pairs *= 7;
    const Item item = ItemOf(as, number);
    return {1 + item.tile / (2 * p.pairs), item.tile % (2 * p.pairs), item.depth};
  }
  if (variant != Variant::kTileByTile) return ItemOf(p, number);
  const int tile = number / p.depth;
  return {1 + tile / (2 * p.pairs), tile % (2 * p.pairs), number % p.depth};
}

// Of pairs up to `end` the group of one, where all but the first one are full.
int GroupAt(const Operation& p, int end, int pair) { return -((end - 1 - pair) / p.group_pairs); }

// Units, and items that are sent, are all that there are, each once, and what is sent comes in the
// order in which it is needed.
void CheckNumbers(const Operation& p) {
  const int size = p.group.size, all = size * p.pairs, before = p.pairs + p.pairs_before;
  std::set<std::tuple<bool, int, int, int>> seen;
  for (int number = 0; number < Units(p); ++number) {
    const Unit unit = UnitAt(p, number);
    Expect(unit.step >= 0 && unit.step < size, "a step that there is not");
    Expect(unit.pair >= 0 && unit.pair < (unit.beside ? p.beside_pairs : p.pairs),
           "a row that there is not");
    Expect(unit.column >= 0 && unit.column < (unit.beside ? p.beside_columns : p.column_tiles),
           "a column that there is not");
    Expect(unit.beside == IsBeside(p, number) || variant != Variant::kSound,
           "a unit that is not where IsBeside says");
    Expect(seen.emplace(unit.beside, unit.step, unit.pair, unit.column).second,
           "two numbers for the same");
  }
  for (int number = 0; number < Items(p); ++number) {
    const Item item = ItemAt(p, number);
    Expect(item.step >= 1 && item.step < size && item.tile >= 0 && item.tile < 2 * p.pairs &&
               item.depth >= 0 && item.depth < p.depth,
           "an item that there is not");
    Expect(seen.emplace(false, size + item.step, item.tile, item.depth).second,
           "two numbers for the same item");
  }
  Expect(static_cast<int>(seen.size()) == Units(p) + Items(p), "something has no number");
  Expect(StagesBeside(p) == 2 * p.tiles * size, "not all rows are contracted, or more");
  if (p.sums) {
    // A part of the rank's own units has come from all peers before any of the next part comes.
    // What waits for no peer comes before what does.
    const int of_shard = p.pairs * p.column_tiles;
    const int first = Units(p) - of_shard;
    std::map<std::pair<int, int>, int> parts;
    std::pair<int, int> last_own = {-p.pairs, 0};
    for (int number = 0; number < of_shard; ++number) {
      const Unit unit = UnitAt(p, first + number);
      Expect(unit.step == size - 1 && !unit.beside, "units for peers after those that wait");
      parts[{unit.pair, unit.column}] = number / p.part;
      const std::pair at = {GroupAt(p, p.pairs, unit.pair), unit.column};
      Expect(at >= last_own, "own units not group after group, or columns not one after the other");
      last_own = at;
    }
    int last = 0;
    for (int number = 0; number < UnitsSent(p); ++number) {
      const Unit unit = UnitAt(p, number);
      Expect(!unit.beside, "units beside before those that are sent");
      const int part = parts[{unit.pair, unit.column}];
      Expect(part >= last, "a part before the one before it has been sent");
      last = part;
    }
    std::pair<int, int> last_beside = {-p.beside_pairs, 0};
    for (int number = UnitsSent(p); number < first; ++number) {
      const Unit unit = UnitAt(p, number);
      const std::pair at = {GroupAt(p, p.beside_pairs, unit.pair), unit.column};
      Expect(at >= last_beside, "units beside not group after group, or not by their columns");
      last_beside = at;
    }
    return;
  }
  // Its own pairs first, then those of each peer, or among many one of each; groups of all these,
  // and in a group columns, or depths of what arrives. What is beside it comes after some pairs
  // that arrive, by columns; after it the groups begin again, and what arrives is one group. Or
  // after that comes the rest of what is beside it.
  const auto number_of = [&](int step, int pair) {
    const bool shard_by_shard = step == 0 || size <= 4;
    return shard_by_shard ? step * p.pairs + pair : p.pairs + pair * (size - 1) + step - 1;
  };
  std::tuple<int, int, int> last_unit = {0, -all, 0}, last_item = {0, -all, 0};
  int beside = 0, last_column = 0;  // of those beside it
  for (int number = 0; number < Units(p); ++number) {
    const Unit unit = UnitAt(p, number);
    if (unit.beside) {
      Expect(unit.column >= last_column, "columns beside it not one after the other");
      last_column = unit.column;
      const bool first = beside++ < UnitsBeside(p) - p.beside_after;
      const std::tuple at = {first ? 1 : 3, 0, 0};
      Expect(at >= last_unit, "units beside it too late, or too early");
      last_unit = at;
      continue;
    }
    const int pair = number_of(unit.step, unit.pair);
    const bool after = p.beside_pairs > 0 && pair >= before;
    const int end = after ? all : before;
    const std::tuple at = {after ? 2 : 0, GroupAt(p, end, pair), unit.column};
    Expect(at >= last_unit, "units not group after group, or columns not one after the other");
    last_unit = at;
  }
  for (int number = 0; number < Items(p); ++number) {
    const Item item = ItemAt(p, number);
    const int pair = number_of(item.step, item.tile / 2);
    const bool after = p.beside_pairs > 0 && pair >= before;
    const std::tuple at = {after ? 1 : 0, after ? 0 : GroupAt(p, before, pair), item.depth};
    Expect(at >= last_item, "items not group after group, or depths not one after the other");
    last_item = at;
  }
}

// What ranks send to one of them lies where it looks for it, and nothing lies there twice.
void CheckPlaces(const Operation& p) {
  const int size = p.group.size;
  const int first = p.sums ? 0 : 1, columns = p.sums ? p.column_tiles : p.depth;
  const int items = p.sums ? ItemsOfTile(kColumns) : 1;
  std::vector<std::set<int>> places(size);
  for (int rank = 0; rank < size; ++rank) {
    Operation sender = p;
    sender.group.rank = rank;
    for (int step = first; step < first + size - 1; ++step) {
      Operation receiver = p;
      receiver.group.rank = Receiver(sender, step);
      Expect(receiver.group.rank != rank, "what a rank sends to itself");
      Expect(!p.sums || receiver.group.rank == Owner(sender, step), "another rank's rows");
      Expect(p.sums || rank == Owner(receiver, step), "a shard that is taken for another rank's");
      const int as = p.sums && variant == Variant::kOtherStep ? size - 2 - step : step;
      Expect(Sender(receiver, as) == rank, "what is awaited from another rank");
      Expect(!p.sums || StepOfSender(receiver, rank) == as, "products looked for at another step");
      for (int tile = 0; tile < p.tiles; ++tile) {
        for (int column = 0; column < columns; ++column) {
          const int place = p.sums ? PlaceOfTile<kColumns>(sender, as, tile, column)
                                   : PlaceOfItem(sender, as, tile, column);
          for (int item = 0; item < items; ++item) {
            Expect(places[receiver.group.rank].insert(place + item).second,
                   "two items in one place");
          }
        }
      }
    }
  }
  const int all = (size - 1) * p.tiles * columns * items;
  for (const std::set<int>& of_rank : places) {
    Expect(static_cast<int>(of_rank.size()) == all, "not all that a rank waits for");
    Expect(*of_rank.begin() == 0 && *of_rank.rbegin() == all - 1,
           "places with gaps: more of a ring is used than there is");
  }
}

// Whether anything is wrong with a variant.
bool IsWrong(Variant tried) {
  variant = tried;
  wrong = 0;
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < 600; ++i) {
    Operation p;
    p.sums = i % 2 == 0;
    p.tiles_of_array = 1 + below(7);
    p.tiles = (1 + below(3)) * p.tiles_of_array;
    p.pairs = (p.tiles + 1) / 2;
    p.column_tiles = 1 + below(6);
    p.group_pairs = 1 + below(9);
    p.depth = 1 + below(5);
    p.part = 1 + below(p.pairs * p.column_tiles);
    p.group.size = 2 + below(7);
    p.group.rank = below(p.group.size);
    p.beside_pairs = below(2) * (1 + below(4));
    p.beside_columns = 1 + below(6);
    p.pairs_before = below((p.group.size - 1) * p.pairs + 1);
    p.beside_after = p.sums ? 0 : below(UnitsBeside(p) + 1);
    CutGroups(&p);
    CheckNumbers(p);
    CheckPlaces(p);
    CheckUnits(p, 1 + below(40), &random);
  }
  return wrong > 0;
}

}  // namespace

int main() {
  if (IsWrong(Variant::kSound)) return 1;
  for (const Variant broken :
       {Variant::kDealt, Variant::kOtherStep, Variant::kTileByTile, Variant::kPairByPair,
        Variant::kShardByShard, Variant::kStepByStep, Variant::kBesideLast,
        Variant::kAllBesideFirst, Variant::kRowsFirst}) {
    if (!IsWrong(broken)) {
      std::printf("not found: broken variant %d\n", static_cast<int>(broken));
      return 1;
    }
  }
  std::printf("done\n");
}
