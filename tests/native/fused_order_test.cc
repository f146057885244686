// The order of a fused collective matmul, and the places in rings: of all ranks, of operations of
// all kinds of sizes, with blocks that run in any number and order. First as the kernel is, then
// with one thing changed, which has to be found.
#include "xla_ffi/cuda/fused_order.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace {

using namespace jax_intranode;

constexpr int kColumns = 192;

// Of the one that runs: as it is; work dealt out to clusters in place of drawn; products looked for
// at another step.
enum class Variant { kSound, kDealt, kOtherStep } variant;
int wrong;

void Expect(bool right, const char* what) {
  if (!right && ++wrong <= 5 && variant == Variant::kSound) std::printf("wrong: %s\n", what);
}

struct Operation {
  bool sums;
  int tiles_of_array, tiles, pairs, column_tiles, group_pairs, depth;
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
  std::vector<bool> left(clusters, false), own_step(clusters, false);
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
      const bool is_sent = p.sums && UnitOf(p, number).step < p.group.size - 1;
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

// Units, and items that are sent, are all that there are, each once, step after step.
void CheckNumbers(const Operation& p) {
  std::set<std::tuple<int, int, int>> seen;
  int step = 0;
  for (int number = 0; number < Units(p); ++number) {
    const Unit unit = UnitOf(p, number);
    Expect(unit.step == step || unit.step == step + 1, "units not step after step");
    step = unit.step;
    Expect(unit.pair >= 0 && unit.pair < p.pairs, "a pair that there is not");
    Expect(unit.column >= 0 && unit.column < p.column_tiles, "a column that there is not");
    Expect(seen.emplace(unit.step, unit.pair, unit.column).second, "a unit twice");
  }
  seen.clear();
  step = 0;
  for (int number = 0; number < (p.group.size - 1) * p.tiles * p.depth; ++number) {
    const Item item = ItemOf(p, number);
    Expect(item.step == step || item.step == step + 1, "items not step after step");
    step = item.step;
    Expect(item.tile >= 0 && item.tile < p.tiles, "a row tile that there is not");
    Expect(item.depth >= 0 && item.depth < p.depth, "a depth that there is not");
    Expect(seen.emplace(item.step, item.tile, item.depth).second, "an item twice");
  }
}

// What ranks send to one of them lies where it looks for it, and nothing lies there twice.
void CheckPlaces(Operation p) {
  const int size = p.group.size;
  for (int receiver = 0; receiver < size; ++receiver) {
    std::set<int> places;
    int count = 0;
    for (int sender = 0; sender < size; ++sender) {
      if (sender == receiver) continue;
      for (int step = 0; step < size; ++step) {
        if (!p.sums && step == 0) continue;
        Operation of_sender = p, of_receiver = p;
        of_sender.group.rank = sender;
        of_receiver.group.rank = receiver;
        // An all-gather's step s sends to rank - s, a sum's to the owner of the rows.
        const int to = p.sums ? Owner(of_sender, step) : RankAfter(of_sender, size - step);
        if (to != receiver) continue;
        if (!p.sums) {
          Expect(Owner(of_receiver, step) == sender, "a shard that is taken for another rank's");
        } else {
          int expected = receiver - sender - 1;
          if (expected < 0) expected += size;
          if (variant == Variant::kOtherStep) expected = size - 1 - expected;
          Expect(step == expected, "products that are looked for at another step");
        }
        for (int tile = 0; tile < p.tiles; ++tile) {
          const int of_tile = p.sums ? p.column_tiles : p.depth;
          for (int k = 0; k < of_tile; ++k) {
            const int items = p.sums ? ItemsOfTile(kColumns) : 1;
            const int place = p.sums ? PlaceOfTile<kColumns>(of_sender, step, tile, k)
                                     : PlaceOfItem(of_sender, step, tile, k);
            for (int item = 0; item < items; ++item) {
              Expect(places.insert(place + item).second, "two items in one place");
              ++count;
            }
          }
        }
      }
    }
    Expect(places.empty() || (*places.begin() == 0 && *places.rbegin() == count - 1),
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
    p.group.size = 2 + below(7);
    p.group.rank = below(p.group.size);
    CheckNumbers(p);
    CheckPlaces(p);
    CheckUnits(p, 1 + below(40), &random);
  }
  return wrong > 0;
}

}  // namespace

int main() {
  if (IsWrong(Variant::kSound)) return 1;
  for (const Variant broken : {Variant::kDealt, Variant::kOtherStep}) {
    if (!IsWrong(broken)) {
      std::printf("not found: broken variant %d\n", static_cast<int>(broken));
      return 1;
    }
  }
  std::printf("done\n");
}
