// Tests the order of tiles and the ring slots of a fused collective matmul (fused_order.h) on the
// host: all ranks, random sizes, clusters that run in any number and in any order.
#include "xla_ffi/cuda/fused_order.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace {

using namespace jax_intranode;

constexpr int kColumns = 192;

int wrong;

void Expect(bool right, const char* what) {
  if (!right && ++wrong <= 5) std::printf("wrong: %s\n", what);
}

bool In(int number, int end) { return number >= 0 && number < end; }

// The work lists that the clusters of a rank have claimed.
struct Lists {
  int clusters;
  int claimed = 0;
};

struct Cluster {
  const TileOrder& p;
  Lists* lists;
  mutable std::vector<int> got = {};

  int Clusters() const { return lists->clusters; }
  int List(int k) const {
    while (static_cast<int>(got.size()) <= k) {
      got.push_back(lists->claimed++);
    }
    return got[k];
  }
};

// Each cluster tile is computed once. Tiles that peers wait for are computed by the clusters that
// run, before these wait for peers.
void CheckClusterTiles(const TileOrder& p, int clusters, std::mt19937* random) {
  // These run from the start, in any order. The others run when all of these have ended.
  const int running = 1 + static_cast<int>((*random)() % clusters);
  Lists lists{clusters};
  std::vector<Cluster> all;
  for (int i = 0; i < clusters; ++i) all.push_back(Cluster{p, &lists});
  std::vector<ClusterTileLoop<Cluster>> tiles;
  for (const Cluster& cluster : all) tiles.emplace_back(cluster);
  std::vector<int> done(ClusterTiles(p), 0);
  std::vector<bool> own_step(clusters, false);
  int sent = 0;
  for (int first = 0, last = running; first < clusters; first = last, last = clusters) {
    std::vector<int> at;
    for (int i = first; i < last; ++i) at.push_back(i);
    while (!at.empty()) {
      const size_t k = (*random)() % at.size();
      const int i = at[k];
      if (!tiles[i].Next()) {
        at.erase(at.begin() + k);
        continue;
      }
      const int number = tiles[i].number();
      Expect(In(number, ClusterTiles(p)), "a cluster tile that does not exist");
      if (!In(number, ClusterTiles(p))) return;
      ++done[number];
      const ClusterTile tile = ClusterTileOf(p, number);
      const bool is_sent = p.reduce_scatter && !tile.wgrad && tile.step < p.size - 1;
      Expect(is_sent == tiles[i].is_sent(), "is_sent contradicts the tile's step");
      if (is_sent) Expect(!own_step[i], "a tile for a peer after one that waits for peers");
      own_step[i] = own_step[i] || !is_sent;
      sent += is_sent;
    }
    if (first == 0) {
      Expect(sent == ClusterTilesSent(p), "tiles for peers left to clusters that do not run");
    }
  }
  Expect(std::all_of(done.begin(), done.end(), [](int n) { return n == 1; }),
         "a cluster tile not computed once");
  Expect(lists.claimed == SentLists(p, clusters) + clusters, "more lists claimed than exist");
}

// Each cluster tile, and each chunk that is sent, has one number.
void CheckNumbers(const TileOrder& p) {
  const int size = p.size;
  std::set<std::tuple<bool, int, int, int>> seen;
  for (int number = 0; number < ClusterTiles(p); ++number) {
    const ClusterTile tile = ClusterTileOf(p, number);
    Expect(In(tile.step, size) && In(tile.row_pair, tile.wgrad ? p.wgrad_row_pairs : p.row_pairs) &&
               In(tile.column, tile.wgrad ? p.wgrad_column_tiles : p.column_tiles),
           "a tile that does not exist");
    Expect(tile.wgrad == IsWgrad(p, number), "a tile that is not where IsWgrad says");
    Expect(seen.emplace(tile.wgrad, tile.step, tile.row_pair, tile.column).second,
           "two numbers for the same tile");
  }
  for (int number = 0; number < ChunksSent(p); ++number) {
    const Chunk chunk = ChunkOf(p, number);
    Expect(In(chunk.step - 1, size - 1) && In(chunk.row_tile, 2 * p.row_pairs) &&
               In(chunk.k, p.k_chunks),
           "a chunk that does not exist");
    Expect(seen.emplace(false, size + chunk.step, chunk.row_tile, chunk.k).second,
           "two numbers for the same chunk");
  }
  Expect(static_cast<int>(seen.size()) == ClusterTiles(p) + ChunksSent(p),
         "a tile or a chunk without a number");
  Expect(WgradStages(p) == 2 * p.row_tiles * size, "not all rows are contracted, or more");
}

// Each rank looks for what its peers send in the slots in which they store it. No slot is used
// twice.
void CheckSlots(const TileOrder& p) {
  const int size = p.size;
  const int first = p.reduce_scatter ? 0 : 1,
            columns = p.reduce_scatter ? p.column_tiles : p.k_chunks;
  const int chunks = p.reduce_scatter ? ChunksOfTile(kColumns) : 1;
  std::vector<std::set<int>> slots(size);
  for (int rank = 0; rank < size; ++rank) {
    TileOrder sender = p;
    sender.rank = rank;
    for (int step = first; step < first + size - 1; ++step) {
      TileOrder receiver = p;
      receiver.rank = Receiver(sender, step);
      Expect(receiver.rank != rank, "a rank sends to itself");
      Expect(!p.reduce_scatter || receiver.rank == Owner(sender, step), "another rank's rows");
      Expect(p.reduce_scatter || rank == Owner(receiver, step), "a shard taken for another rank's");
      Expect(Sender(receiver, step) == rank, "awaited from another rank");
      Expect(!p.reduce_scatter || StepOfSender(receiver, rank) == step,
             "products looked for at another step");
      for (int tile = 0; tile < p.row_tiles; ++tile) {
        for (int column = 0; column < columns; ++column) {
          const int slot = p.reduce_scatter ? SlotOfTile<kColumns>(sender, step, tile, column)
                                            : SlotOfChunk(sender, step, tile, column);
          for (int chunk = 0; chunk < chunks; ++chunk) {
            Expect(slots[receiver.rank].insert(slot + chunk).second, "two chunks in one slot");
          }
        }
      }
    }
  }
  const int all = (size - 1) * p.row_tiles * columns * chunks;
  for (const std::set<int>& of_rank : slots) {
    Expect(static_cast<int>(of_rank.size()) == all, "not all that a rank waits for");
    Expect(*of_rank.begin() == 0 && *of_rank.rbegin() == all - 1,
           "unused slots: more of a ring is used than there is");
  }
}

}  // namespace

// Checks random sizes.
int main() {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < 600; ++i) {
    TileOrder p = {};
    p.reduce_scatter = i % 2 == 0;
    p.row_tiles_per_array = 1 + below(7);
    p.row_tiles = (1 + below(3)) * p.row_tiles_per_array;
    p.row_pairs = (p.row_tiles + 1) / 2;
    p.column_tiles = 1 + below(6);
    p.band_pairs = 1 + below(9);
    p.k_chunks = 1 + below(5);
    p.part_tiles = 1 + below(p.row_pairs * p.column_tiles);
    p.size = 2 + below(7);
    p.rank = below(p.size);
    p.wgrad_row_pairs = below(2) * (1 + below(4));
    p.wgrad_column_tiles = 1 + below(6);
    p.row_pairs_before_wgrad = below((p.size - 1) * p.row_pairs + 1);
    p.wgrad_tiles_last = p.reduce_scatter ? 0 : below(WgradTiles(p) + 1);
    SetShortBands(&p);
    CheckNumbers(p);
    CheckSlots(p);
    CheckClusterTiles(p, 1 + below(40), &random);
  }
  if (wrong > 0) return 1;
  std::printf("done\n");
}
