#include <cudaTypedefs.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "fused_matmul.h"

// Warps can't change the number of their registers in a kernel that calls.
#define JIN_GIVE_UP_FN __device__ __forceinline__

#include "../kernels/types.h"
#include "device_thread.h"
#include "fused_order.h"
#include "hopper.h"
#include "slab.h"

namespace jax_intranode {
namespace {

using namespace hopper;

// What a tile of products, and of operands, is made of: 64 columns of 128 rows, in the layout that
// matrix instructions and tensor maps call swizzled by 128 bytes. So it travels, too: in halves of
// 64 rows, each of which has a flag.
constexpr uint32_t kItem = kTileRows * kTileDepth * kMatmulItemBytes;
constexpr uint32_t kHalf = kItem / 2;
static_assert(kHalf == kBytesOfFlag);
constexpr uint32_t kHalfRows = kTileRows / 2;

struct MatrixOfCall {
  CUtensorMap w, product;
  int first_tile;  // of its columns, among those of all matrices
};

struct Parameters {
  CUtensorMap x;
  MatrixOfCall of[kMaxMatrices];
  DeviceGroup group;
  char* ring[kMaxRanks];  // each rank's, as this rank addresses it
  size_t data_offset;     // in a ring
  char* scratch;
  const char* rows_of_x;
  char* gathered;  // or null
  int matrices;
  bool sums;                         // reduce-scatter
  int rows;                          // of a shard's arrays
  int row_bytes;                     // of x
  int depth;                         // items of a row tile, of the contracted dimension
  int tiles_of_array, tiles, pairs;  // of rows, of a shard
  int column_tiles;
  int group_pairs;
};
static_assert(sizeof(Parameters) <= 4096);

constexpr int kThreads = 3 * 128;
constexpr int kRegistersOfFeeders = 72;
constexpr int kRegistersOfMultipliers = 216;
constexpr int kMaxClusters = 72;  // a whole Hopper chip has 144 multiprocessors

// Shared memory, from a multiple of 1024: stages, each an item of rows and then what they are
// multiplied with; two buffers for each half of a product; barriers; counts; lists that the cluster
// has drawn, of which there is one more at most than clusters.
template <int kColumns>
struct Layout {
  static constexpr uint32_t kB = kColumns * kTileDepth * 2;
  static constexpr uint32_t kStage = kItem + kB;
  static constexpr int kStages = 196608 / kStage;
  static constexpr uint32_t kBuffers = kStages * kStage;
  static constexpr uint32_t kBarriers = kBuffers + 4 * kHalf;
  static constexpr uint32_t kStored = kBarriers + 8 * 2 * kStages;
  static constexpr uint32_t kDrawn = kStored + 8;
  static constexpr uint32_t kBytes = kDrawn + 4 * (kMaxClusters + 1) + 1024;
  static constexpr int kItems = ItemsOfTile(kColumns);
};

// The matrix that a column tile belongs to.
JIN_FN int MatrixOf(const Parameters& p, int column) {
  int matrix = 0;
  while (matrix + 1 < p.matrices && column >= p.of[matrix + 1].first_tile) ++matrix;
  return matrix;
}

// Where 16 bytes of a row lie in half an item.
JIN_FN int Offset(int row, int column) { return row * 128 + ((column ^ row) & 7) * 16; }

JIN_FN char* Data(const Parameters& p, int rank, int place) {
  return p.ring[rank] + p.data_offset + static_cast<int64_t>(place) * kItem;
}
// Two flags, of an item's halves.
JIN_FN uint32_t* Flags(const Parameters& p, int rank, int place) {
  return reinterpret_cast<uint32_t*>(p.ring[rank] + kRingHeaderBytes) +
         2 * static_cast<int64_t>(place);
}
JIN_FN RingHeader* Ring(const Parameters& p) {
  return reinterpret_cast<RingHeader*>(p.ring[p.group.rank]);
}
JIN_FN Signals* SignalsAt(const Parameters& p, int rank) {
  return reinterpret_cast<Signals*>(p.group.region[rank] + kHeaderBytes / 2);
}

JIN_FN uint64_t LoadAcquire(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
JIN_FN void StoreRelease(uint64_t* to, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
// What this thread has written, or knows to have been written, comes before what it stores next.
JIN_FN void SystemFence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

JIN_FN Pack LoadPack(const char* from) {
  const uint4 got = __ldcg(reinterpret_cast<const uint4*>(from));
  return {{got.x, got.y, got.z, got.w}};
}

JIN_FN void StoreShared(uint32_t at, uint32_t v) {
  asm volatile("st.shared::cta.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
JIN_FN uint32_t LoadShared(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
JIN_FN uint32_t LoadSharedRelaxed(uint32_t at) {
  uint32_t v;
  asm volatile("ld.relaxed.cluster.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
JIN_FN uint32_t LoadSharedAcquire(uint32_t at) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
JIN_FN void StoreSharedRelease(uint32_t at, uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// What the warps of a block share.
template <int kColumns>
struct Block {
  using Place = Layout<kColumns>;
  const Parameters& p;
  uint32_t base;       // of shared memory
  uint32_t operation;  // number of this one on this rank's ring

  JIN_FN uint32_t A(int stage) const { return base + stage * Place::kStage; }
  JIN_FN uint32_t B(int stage) const { return A(stage) + kItem; }
  JIN_FN uint32_t Full(int stage) const { return base + Place::kBarriers + 8 * stage; }
  JIN_FN uint32_t Empty(int stage) const { return Full(Place::kStages + stage); }
  JIN_FN uint32_t Buffer(int half, int k) const {
    return base + Place::kBuffers + (2 * half + k % 2) * kHalf;
  }
  // Tiles of which this half has been stored in scratch.
  JIN_FN uint32_t Stored(int half) const { return base + Place::kStored + 4 * half; }

  // Where the k-th list that the cluster draws is written, and the list, when it has been.
  JIN_FN uint32_t Drawn(int k) const { return base + Place::kDrawn + 4 * k; }
  JIN_FN int List(int k) const {
    uint32_t drawn;
    while ((drawn = LoadSharedRelaxed(Drawn(k))) == 0) {
    }
    return static_cast<int>(drawn) - 1;
  }

  JIN_FN int Clusters() const { return gridDim.x / kClusterSize; }
  // Items that peers have to add to a tile.
  JIN_FN int Terms(const Unit& unit) const {
    return p.sums && unit.step == p.group.size - 1 ? Place::kItems * (p.group.size - 1) : 0;
  }
  // Whether both halves of an item have arrived.
  JIN_FN bool Here(int place) const {
    const uint64_t flags =
        LoadAcquire(reinterpret_cast<const uint64_t*>(Flags(p, p.group.rank, place)));
    return flags == (static_cast<uint64_t>(operation) << 32 | operation);
  }
  JIN_FN DeviceThread Thread() const {
    return DeviceThread(p.group.failure, p.group.timeout_ns, p.group.rank,
                        static_cast<uint32_t>(p.sums ? Algorithm::kMatmulReduceScatter
                                                     : Algorithm::kAllGatherMatmul));
  }
};

// Draws a list for the cluster. One thread of its first block.
JIN_FN uint32_t DrawUnits(const Parameters& p) { return atomicAdd(&Ring(p)->busy, 1); }

// Tells the cluster of its k-th list. The operation's lists are as many as are drawn: if there is
// another one, two operations use the ring.
template <int kColumns>
JIN_FN void TellDrawn(const Block<kColumns>& b, DeviceThread& thread, int k, uint32_t drawn) {
  thread.Admit(drawn >= ListsOfSent(b.p, b.Clusters()) + b.Clusters(), 0);
  for (int rank = 0; rank < kClusterSize; ++rank) StoreToCluster(b.Drawn(k), rank, drawn + 1);
}

// Waits until item k of `count` at a place has arrived. A warp, of which each lane looks at one of
// 32. Returns how many of them have.
template <int kColumns>
JIN_FN int AwaitItems(const Block<kColumns>& b, DeviceThread& thread, int place, int k, int count,
                      int of_rank) {
  const int lane = threadIdx.x & 31;
  for (;;) {
    const uint32_t missing = ~__ballot_sync(~0u, k + lane >= count || b.Here(place + k + lane));
    const int arrived = k + (missing == 0 ? 32 : __ffs(missing) - 1);
    if (arrived > k) {
      __syncwarp();
      ProxyFence();
      return arrived;
    }
    thread.Wait(0, of_rank);
  }
}

// Waits until a tile has arrived from all peers. A warp, of which each lane looks at one item.
template <int kColumns>
JIN_FN void AwaitTile(const Block<kColumns>& b, DeviceThread& thread, int tile, int column) {
  constexpr int kItems = Layout<kColumns>::kItems;
  static_assert((kMaxRanks - 1) * kItems <= 32);
  const Parameters& p = b.p;
  const int lane = threadIdx.x & 31;
  const int step = lane / kItems;
  const int place = PlaceOfTile<kColumns>(p, step, tile, column) + lane % kItems;
  for (;;) {
    const uint32_t missing = ~__ballot_sync(~0u, step >= p.group.size - 1 || b.Here(place));
    if (missing == 0) break;
    thread.Wait(0, Sender(p, (__ffs(missing) - 1) / kItems));
  }
  __syncwarp();
  ProxyFence();
}

// Feeds the stages. One warp.
template <bool kRowsOfB, int kColumns>
JIN_FN void Feed(const Block<kColumns>& b, DeviceThread& thread) {
  using Place = Layout<kColumns>;
  const Parameters& p = b.p;
  const uint32_t side = RankInCluster();
  int stage = 0;
  uint32_t parity = 1;
  const auto advance = [&] {
    if (++stage == Place::kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  UnitsOfCluster<Block<kColumns>> units(b);
  while (units.Next()) {
    // In time for the warps that multiply.
    if (units.NeedsList() && threadIdx.x == 0 && side == 0) {
      TellDrawn(b, thread, units.lists(), DrawUnits(p));
    }
    __syncwarp();
    const Unit unit = UnitOf(p, units.number());
    const int tile = 2 * unit.pair + side;
    const bool real = tile < p.tiles;  // the last pair may have one tile only
    const RowTile rows = RowTileOf(p, tile);
    const int owner = Owner(p, unit.step);
    const bool arrives = !p.sums && unit.step > 0;
    const int array = p.sums ? rows.array * p.group.size + owner : rows.array;
    const int place = PlaceOfItem(p, unit.step, tile, 0);
    const MatrixOfCall& matrix = p.of[MatrixOf(p, unit.column)];
    const int column = (unit.column - matrix.first_tile) * kColumns;
    int arrived = arrives ? 0 : p.depth;
    for (int k = 0; k < p.depth; ++k) {
      if (real && k >= arrived) arrived = AwaitItems(b, thread, place, k, p.depth, owner);
      if (Elected()) {
        const uint32_t full = b.Full(stage), a = b.A(stage), to = b.B(stage);
        BarrierWait(b.Empty(stage), parity);
        BarrierExpect(full, real ? Place::kStage : Place::kB);
        if (real && arrives) {
          Load(a, Data(p, p.group.rank, place + k), kItem, full);
        } else if (real) {
          Load(a, p.x, k * kTileDepth, rows.row, array, full);
          Load(a + kHalf, p.x, k * kTileDepth, rows.row + kHalfRows, array, full);
        }
        // Each block of the cluster loads half of what both need.
        if (kRowsOfB) {
          JIN_UNROLL
          for (int n = 0; n < kColumns; n += 64) {
            LoadToBoth(to + n * kTileDepth * 2 + side * 4096, matrix.w, column + n,
                       k * kTileDepth + side * 32, full);
          }
        } else {
          LoadToBoth(to + side * (Place::kB / 2), matrix.w, k * kTileDepth,
                     column + side * (kColumns / 2), full);
        }
      }
      advance();
    }
    if (b.Terms(unit) == 0) continue;
    // What the peers add, in the order in which it is added: rank q sent its at step rank - q - 1.
    if (real) AwaitTile(b, thread, tile, unit.column);
    for (int item = 0; item < Place::kItems; ++item) {
      for (int q = 0; q < p.group.size; ++q) {
        if (q == p.group.rank) continue;
        const int step = StepOfSender(p, q);
        if (Elected()) {
          BarrierWait(b.Empty(stage), parity);
          BarrierExpect(b.Full(stage), real ? kItem : 0);
          if (real) {
            const int of_tile = PlaceOfTile<kColumns>(p, step, tile, unit.column);
            Load(b.A(stage), Data(p, p.group.rank, of_tile + item), kItem, b.Full(stage));
          }
        }
        advance();
      }
    }
  }
}

// Until the peer lends its ring. Returns the number of its operation there.
JIN_FN uint32_t AwaitGrant(const Parameters& p, DeviceThread& thread, int peer,
                           uint32_t operations) {
  const uint64_t* const word = &SignalsAt(p, p.group.rank)->lent[peer];
  uint64_t granted;
  while (static_cast<uint32_t>(granted = LoadAcquire(word)) != operations + 1) {
    thread.Wait(0, peer);
  }
  return static_cast<uint32_t>(granted >> 32);
}

// Copies half an item by a warp: `load(row, column)` reads 16 bytes, `store(row, column, pack)`
// writes them. Eight lanes share a row. Calls `meanwhile` while the first loads are under way.
template <class LoadRow, class StoreRow, class Meanwhile>
JIN_FN void CopyHalf(LoadRow&& load, StoreRow&& store, Meanwhile&& meanwhile) {
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x & 31;
  for (int first = lane / 8; first < static_cast<int>(kHalfRows); first += 4 * kAtOnce) {
    Pack packs[kAtOnce];
    JIN_UNROLL
    for (int i = 0; i < kAtOnce; ++i) packs[i] = load(first + 4 * i, lane % 8);
    if (first == lane / 8) meanwhile();
    JIN_UNROLL
    for (int i = 0; i < kAtOnce; ++i) store(first + 4 * i, lane % 8, packs[i]);
  }
}

// Tells peers of what the warp has written there: of each half of an item when it has begun with
// the next one, for that takes a while.
class News {
 public:
  JIN_FN void Add(uint32_t* flag, uint32_t number) {
    flag_ = flag;
    number_ = number;
  }
  JIN_FN void Tell() {
    __syncwarp();
    if (flag_ != nullptr && (threadIdx.x & 31) == 0) {
      SystemFence();
      StoreWord(flag_, number_);
    }
    flag_ = nullptr;
  }

 private:
  uint32_t* flag_ = nullptr;
  uint32_t number_ = 0;
};

// Of an operand's item, or of the gathered operand's, one half.
struct HalfOfRows {
  int64_t offset;             // of its first row and column, in bytes
  int rows_left, bytes_left;  // from there on

  JIN_FN HalfOfRows(const Parameters& p, const RowTile& rows, int64_t array, int depth, int half) {
    const int first = rows.row + half * kHalfRows;
    offset = (array * p.rows + first) * p.row_bytes + depth * kTileDepth * 2;
    rows_left = p.rows - first;
    bytes_left = p.row_bytes - depth * kTileDepth * 2;
  }
  JIN_FN bool Has(int row, int column) const { return row < rows_left && column * 16 < bytes_left; }
  JIN_FN int64_t At(const Parameters& p, int row, int column) const {
    return offset + static_cast<int64_t>(row) * p.row_bytes + column * 16;
  }
};

// Sends one half of items of the rank's shard to all peers, and copies them into the gathered x if
// there is one: list after list that the warp draws, of which there is one for each block. A warp.
template <int kColumns>
JIN_FN void SendItems(const Block<kColumns>& b, uint32_t operations, int half) {
  const Parameters& p = b.p;
  DeviceThread thread = b.Thread();
  const int items = (p.group.size - 1) * p.tiles * p.depth;
  const auto draw = [&] {
    const bool draws = threadIdx.x % 32 == 0;
    return __shfl_sync(~0u, draws ? atomicAdd(&Ring(p)->drawn_items[half], 1) : 0, 0);
  };
  int step = 0, peer = 0;
  uint32_t number = 0;
  News news;
  for (uint32_t list = draw(); list < gridDim.x; list = draw()) {
    for (int i = list; i < items; i += gridDim.x) {
      const Item item = ItemOf(p, i);
      if (item.step + 1 != step) {
        news.Tell();  // before it waits
        step = item.step + 1;
        peer = Receiver(p, step);
        number = AwaitGrant(p, thread, peer, operations);
      }
      const RowTile rows = RowTileOf(p, item.tile);
      const HalfOfRows from(p, rows, rows.array, item.depth, half);
      const bool keeps = p.gathered != nullptr && step == 1;  // the shard goes there once, too
      const HalfOfRows own(p, rows, static_cast<int64_t>(rows.array) * p.group.size + p.group.rank,
                           item.depth, half);
      const int place = PlaceOfItem(p, step, item.tile, item.depth);
      char* const to = Data(p, peer, place) + half * kHalf;
      CopyHalf(
          [&](int row, int column) {
            return from.Has(row, column) ? LoadPack(p.rows_of_x + from.At(p, row, column)) : Pack{};
          },
          [&](int row, int column, const Pack& pack) {
            *reinterpret_cast<Pack*>(to + Offset(row, column)) = pack;
            if (keeps && own.Has(row, column)) {
              *reinterpret_cast<Pack*>(p.gathered + own.At(p, row, column)) = pack;
            }
          },
          [&] { news.Tell(); });
      news.Add(Flags(p, peer, place) + half, number);
    }
  }
  news.Tell();
}

// Copies the block's items of the peers' shards into the gathered x, as they arrive. A warp.
template <int kColumns>
JIN_FN void KeepItems(const Block<kColumns>& b) {
  const Parameters& p = b.p;
  DeviceThread thread = b.Thread();
  const int items = (p.group.size - 1) * p.tiles * p.depth;
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item = ItemOf(p, i);
    const int step = item.step + 1;
    const int owner = RankAfter(p, step);
    const RowTile rows = RowTileOf(p, item.tile);
    const int place = PlaceOfItem(p, step, item.tile, item.depth);
    AwaitItems(b, thread, place, 0, 1, owner);
    for (int half = 0; half < 2; ++half) {
      const HalfOfRows to(p, rows, static_cast<int64_t>(rows.array) * p.group.size + owner,
                          item.depth, half);
      const char* const from = Data(p, p.group.rank, place) + half * kHalf;
      CopyHalf([&](int row, int column) { return LoadPack(from + Offset(row, column)); },
               [&](int row, int column, const Pack& pack) {
                 if (to.Has(row, column)) {
                   *reinterpret_cast<Pack*>(p.gathered + to.At(p, row, column)) = pack;
                 }
               },
               [] {});
    }
  }
}

// Sends one half of the block's tiles of products to their owners. A warp.
template <int kColumns>
JIN_FN void SendTiles(const Block<kColumns>& b, uint32_t operations, int half) {
  const Parameters& p = b.p;
  DeviceThread thread = b.Thread();
  uint32_t tiles = 0;  // so far
  int step = -1, peer = 0;
  uint32_t number = 0;
  News news;
  UnitsOfCluster<Block<kColumns>> units(b);
  while (units.Next() && units.is_sent()) {
    const Unit unit = UnitOf(p, units.number());
    const int tile = 2 * unit.pair + RankInCluster();
    if (tile >= p.tiles) continue;
    // Before it waits it tells of all that it has sent.
    if (unit.step != step) {
      news.Tell();
      step = unit.step;
      peer = Receiver(p, step);
      number = AwaitGrant(p, thread, peer, operations);
    }
    ++tiles;
    const auto is_stored = [&] {  // for all lanes or for none
      return __all_sync(~0u, LoadSharedAcquire(b.Stored(half)) >= tiles);
    };
    if (!is_stored()) {
      news.Tell();
      while (!is_stored()) {
      }
    }
    for (int item = 0; item < Layout<kColumns>::kItems; ++item) {
      const int place = PlaceOfTile<kColumns>(p, step, tile, unit.column) + item;
      const char* const from = p.scratch + static_cast<int64_t>(place) * kItem + half * kHalf;
      char* const to = Data(p, peer, place) + half * kHalf;
      CopyHalf([&](int row, int column) { return LoadPack(from + row * 128 + column * 16); },
               [&](int row, int column, const Pack& pack) {
                 *reinterpret_cast<Pack*>(to + row * 128 + column * 16) = pack;
               },
               [&] { news.Tell(); });
      news.Add(Flags(p, peer, place) + half, number);
    }
  }
  news.Tell();
}

// Where a product goes.
struct Target {
  bool real;
  int terms;                       // items that peers add to it
  int place;                       // in scratch, if it goes to a peer
  int matrix, array, row, column;  // in a result, if not

  template <int kColumns>
  JIN_FN static Target Of(const Block<kColumns>& b, int number) {
    const Parameters& p = b.p;
    const Unit unit = UnitOf(p, number);
    const int tile = 2 * unit.pair + RankInCluster();
    const RowTile rows = RowTileOf(p, tile);
    const int matrix = MatrixOf(p, unit.column);
    return {tile < p.tiles,
            b.Terms(unit),
            PlaceOfTile<kColumns>(p, unit.step, tile, unit.column),
            matrix,
            p.sums ? rows.array : rows.array * p.group.size + Owner(p, unit.step),
            rows.row,
            (unit.column - p.of[matrix].first_tile) * kColumns};
  }
};

// Multiplies: a warpgroup, of each tile its half of the rows.
template <class Type, bool kRowsOfB, int kColumns>
JIN_FN void Multiply(const Block<kColumns>& b) {
  using Place = Layout<kColumns>;
  const Parameters& p = b.p;
  const int half = threadIdx.x / 128 - 1;
  const int thread = threadIdx.x % 128;
  const int lane = threadIdx.x % 32;
  // The accumulators' layout: of each 8 columns a quad of lanes has a row, and the row 8 below.
  const int row = thread / 32 * 16 + lane / 4;
  uint32_t first_offset = Offset(row, 0) + lane % 4 * 4;
  asm volatile("" : "+r"(first_offset));  // a register, not a computation at each use
  const auto offset_of = [&](int i) {     // of accumulators 2 i and 2 i + 1, of those of an item
    return (first_offset ^ i / 2 * 16) + i % 2 * 1024;
  };
  const auto sync_half = [&] { half == 0 ? NamedSync<1, 128>() : NamedSync<2, 128>(); };
  int stage = 0, last = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    last = stage;
    if (++stage == Place::kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  const auto release = [&](int of_stage) {
    if (thread < kClusterSize) BarrierArrive(b.Empty(of_stage), thread, 1);
  };
  uint32_t stored = 0;
  bool sends = false;  // the last tile goes to a peer
  const auto tell_sender = [&] {
    if (sends && thread == 0) {
      StoreWait<0>();
      StoreSharedRelease(b.Stored(half), ++stored);
    }
    sends = false;
  };
  UnitsOfCluster<Block<kColumns>> units(b);
  while (units.Next()) {
    float d[kColumns / 2];
    Target at;
    for (int k = 0; k < p.depth; ++k) {
      BarrierWait(b.Full(stage), parity);
      const uint64_t a = TileDescriptor(b.A(stage) + half * kHalf, 0);
      const uint64_t w = TileDescriptor(b.B(stage), kTileDepth * 128);
      MatmulFence();
      JIN_UNROLL
      for (int i = 0; i < kTileDepth / 16; ++i) {
        Matmul16<std::is_same_v<Type, BF16>, kRowsOfB>(d, a + 2 * i, w + (kRowsOfB ? 128 : 2) * i,
                                                       k + i > 0);
      }
      MatmulCommit();
      if (k == 0) {
        at = Target::Of(b, units.number());  // while the matrix instructions run
      } else {
        MatmulWait<1>();
        release(last);
      }
      if (k == 3) tell_sender();  // it does not have to wait by now
      advance();
    }
    tell_sender();
    MatmulWait<0>();
    release(last);

    sends = p.sums && at.terms == 0 && at.real;
    // Of an item of the product 32 values: through shared memory, from where a bulk copy stores it
    // while this warp goes on.
    const auto store = [&](int item, const float* values) {
      const uint32_t buffer = b.Buffer(half, item);
      if (thread == 0) {
        // The buffer of two items ago has been read; of three items the last one's is the first's.
        Place::kItems % 2 == 1 && item == 0 ? StoreWaitRead<0>() : StoreWaitRead<1>();
      }
      sync_half();
      JIN_UNROLL
      for (int i = 0; i < 16; ++i) {
        StoreShared(buffer + offset_of(i), Type::RoundPair(values[2 * i], values[2 * i + 1]));
      }
      SharedProxyFence();
      sync_half();
      if (thread == 0) {
        if (sends) {
          Store(p.scratch + static_cast<int64_t>(at.place + item) * kItem + half * kHalf, buffer,
                kHalf);
        } else if (at.real) {
          Store(p.of[at.matrix].product, at.column + item * 64, at.row + half * kHalfRows, at.array,
                buffer);
        }
        StoreCommit();  // of nothing, too: buffers are counted by groups
      }
    };
    if (at.terms == 0) {
      JIN_UNROLL
      for (int item = 0; item < Place::kItems; ++item) store(item, &d[32 * item]);
      continue;
    }
    JIN_UNROLL
    for (int item = 0; item < Place::kItems; ++item) {
      float sum[32];
      JIN_UNROLL
      for (float& value : sum) value = -0.f;  // adding to it changes nothing, not even a sign
      const auto add = [&](int i, uint32_t word) {
        float low, high;
        Type::UnpackPair(word, &low, &high);
        sum[2 * i] += low;
        sum[2 * i + 1] += high;
      };
      for (int q = 0; q < p.group.size; ++q) {
        if (q == p.group.rank) {
          JIN_UNROLL
          for (int i = 0; i < 16; ++i) {
            add(i, Type::RoundPair(d[32 * item + 2 * i], d[32 * item + 2 * i + 1]));
          }
          continue;
        }
        BarrierWait(b.Full(stage), parity);
        const uint32_t from = b.A(stage) + half * kHalf;
        JIN_UNROLL
        for (int i = 0; i < 16; ++i) add(i, LoadShared(from + offset_of(i)));
        sync_half();
        advance();
        release(last);
      }
      store(item, sum);
    }
  }
  tell_sender();
  if (thread == 0) StoreWait<0>();
}

template <class Type, bool kRowsOfB, int kColumns>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    jax_intranode_fused_matmul(const __grid_constant__ Parameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  using Place = Layout<kColumns>;
  RingHeader* const ring = Ring(p);
  Signals* const own = SignalsAt(p, p.group.rank);
  const uint32_t operations = LoadWord(&own->opened);
  const Block<kColumns> b{p, (SharedAddress(memory) + 1023) & ~1023u, LoadWord(&ring->fused) + 1};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Place::kStages; ++stage) {
      BarrierInit(b.Full(stage), 1);
      BarrierInit(b.Empty(stage), 2 * kClusterSize);  // both halves, of both blocks
    }
    StoreShared(b.Stored(0), 0);
    StoreShared(b.Stored(1), 0);
    BarrierInitFence();
  }
  if (threadIdx.x <= kMaxClusters) StoreShared(b.Drawn(threadIdx.x), 0);
  // The first list is on its way while the cluster meets.
  const bool draws = threadIdx.x == 0 && RankInCluster() == 0;
  const uint32_t drawn = draws ? DrawUnits(p) : 0;
  const uint32_t closed = draws ? LoadWord(&p.group.Header()->closed) : 0;
  __syncwarp();
  ClusterSync();
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    KeepRegisters<kRegistersOfFeeders>();
    if (warp == 0) {
      DeviceThread thread = b.Thread();
      if (draws) {
        if (drawn == 0) {  // the operation begins
          thread.Admit(0, closed);
          for (int step = 1; step < p.group.size; ++step) {
            StoreRelease(&SignalsAt(p, RankAfter(p, step))->lent[p.group.rank],
                         static_cast<uint64_t>(b.operation) << 32 | (operations + 1));
          }
        }
        TellDrawn(b, thread, 0, drawn);
      }
      __syncwarp();
      Feed<kRowsOfB>(b, thread);
    } else if (warp <= 2) {
      p.sums ? SendTiles(b, operations, warp - 1) : SendItems(b, operations, warp - 1);
    } else if (p.gathered != nullptr) {
      KeepItems(b);
    }
  } else {
    TakeRegisters<kRegistersOfMultipliers>();
    Multiply<Type, kRowsOfB>(b);
  }
  __syncwarp();
  ClusterSync();  // nobody leaves while another block may still copy into its memory
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&ring->left, 1) == gridDim.x - 1) {
      ring->left = 0;
      for (uint32_t& drawn_items : ring->drawn_items) drawn_items = 0;
      StoreWord(&ring->fused, b.operation);
      StoreWord(&own->opened, operations + 1);
      StoreWord(&ring->busy, 0);
    }
  }
#endif
}

struct Kernel {
  const void* function;
  size_t shared_bytes;
};

template <class Type, bool kRowsOfB>
Kernel KernelOf(int columns) {
  const auto of = [](auto* function, size_t bytes) {
    return Kernel{reinterpret_cast<const void*>(function), bytes};
  };
  if (columns == 128) {
    return of(&jax_intranode_fused_matmul<Type, kRowsOfB, 128>, Layout<128>::kBytes);
  }
  if (columns == 192) {
    return of(&jax_intranode_fused_matmul<Type, kRowsOfB, 192>, Layout<192>::kBytes);
  }
  return of(&jax_intranode_fused_matmul<Type, kRowsOfB, 256>, Layout<256>::kBytes);
}

Kernel KernelFor(ElementType type, bool transposed, int columns) {
  if (type == ElementType::kBF16) {
    return transposed ? KernelOf<BF16, false>(columns) : KernelOf<BF16, true>(columns);
  }
  return transposed ? KernelOf<F16, false>(columns) : KernelOf<F16, true>(columns);
}

void Check(cudaError_t status) { ThrowIfError(status, "launching a collective matmul"); }

// An array of 16-bit items, its fastest dimension first, of which boxes are loaded or stored.
CUtensorMap Map(ElementType type, const void* at, std::vector<uint64_t> dims,
                std::vector<uint32_t> box) {
  static const auto encode =
      reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(DriverFunction("cuTensorMapEncodeTiled"));
  const cuuint32_t rank = static_cast<cuuint32_t>(dims.size());
  std::vector<cuuint64_t> strides;  // of all but the fastest
  cuuint64_t stride = 2;
  for (size_t d = 0; d + 1 < dims.size(); ++d) strides.push_back(stride *= dims[d]);
  const std::vector<cuuint32_t> steps(rank, 1);
  CUtensorMap map;
  const CUresult result = encode(
      &map,
      type == ElementType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      rank, const_cast<void*>(at), reinterpret_cast<const cuuint64_t*>(dims.data()), strides.data(),
      box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("jax_intranode: cuTensorMapEncodeTiled failed with CUresult " +
                             std::to_string(result) + " for " + std::to_string(dims[1]) + " x " +
                             std::to_string(dims[0]));
  }
  return map;
}

int DivideUp(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

int RowTiles(const MatmulCall& call) {
  return static_cast<int>(call.outer) * DivideUp(call.rows, kTileRows);
}
int ColumnTiles(const MatmulCall& call, const MatmulPlan& plan) {
  int tiles = 0;
  for (const int64_t n : call.ns) tiles += DivideUp(n, plan.tile_columns);
  return tiles;
}

// Blocks that the device has room for, all at once.
int BlocksOf(const Kernel& kernel) {
  int device;
  Check(cudaGetDevice(&device));
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> known;
  std::lock_guard lock(mutex);
  int& blocks = known[{device, kernel.function}];
  if (blocks == 0) {
    Check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kernel.shared_bytes)));
    int multiprocessors, clusters;
    Check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kClusterSize, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = multiprocessors / kClusterSize * kClusterSize;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kernel.shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    Check(cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &config));
    blocks = kClusterSize * std::min(clusters, kMaxClusters);
  }
  return blocks;
}

}  // namespace

size_t FusedScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                         const MatmulPlan& plan) {
  if (algorithm == Algorithm::kAllGatherMatmul) return 0;
  return static_cast<size_t>(size - 1) * RowTiles(call) * ColumnTiles(call, plan) * kTileRows *
         plan.tile_columns * 2;
}

void LaunchFused(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                 const MatmulCall& call, cudaStream_t stream) {
  const DeviceGroup& group = member.group;
  const bool sums = algorithm == Algorithm::kMatmulReduceScatter;
  Parameters p = {};
  p.group = group;
  std::copy(std::begin(member.ring), std::end(member.ring), p.ring);
  p.data_offset = RingDataOffset(member.ring_bytes);
  const size_t items =
      static_cast<size_t>(group.size - 1) * RowTiles(call) * DivideUp(call.k, kTileDepth);
  const size_t needed = sums ? FusedScratchBytes(algorithm, call, group.size, plan) : items * kItem;
  if (needed > member.data_bytes()) {
    throw std::runtime_error("jax_intranode: a collective matmul takes " + std::to_string(needed) +
                             " bytes of a ring of " + std::to_string(member.data_bytes()) +
                             "; JAX_INTRANODE_RING_MIB sets its size");
  }
  p.scratch = static_cast<char*>(call.scratch);
  p.matrices = static_cast<int>(call.ws.size());
  p.sums = sums;
  p.rows_of_x = static_cast<const char*>(call.x);
  p.gathered = static_cast<char*>(call.gathered);
  p.rows = static_cast<int>(call.rows);
  p.row_bytes = static_cast<int>(call.k * 2);
  p.depth = DivideUp(call.k, kTileDepth);
  p.tiles_of_array = DivideUp(call.rows, kTileRows);
  p.tiles = RowTiles(call);
  p.pairs = DivideUp(p.tiles, 2);
  p.column_tiles = ColumnTiles(call, plan);
  p.group_pairs = plan.group_pairs;
  const uint64_t k = call.k, rows = call.rows, outer = call.outer;
  p.x = Map(call.type, call.x, {k, rows, outer * (sums ? group.size : 1)},
            {kTileDepth, kHalfRows, 1});
  int first_tile = 0;
  for (int i = 0; i < p.matrices; ++i) {
    const uint64_t n = call.ns[i];
    p.of[i].first_tile = first_tile;
    first_tile += DivideUp(n, plan.tile_columns);
    p.of[i].product = Map(call.type, call.products[i], {n, rows, outer * (sums ? 1 : group.size)},
                          {64, kHalfRows, 1});
    p.of[i].w = call.transposed ? Map(call.type, call.ws[i], {k, n},
                                      {kTileDepth, static_cast<uint32_t>(plan.tile_columns / 2)})
                                : Map(call.type, call.ws[i], {n, k}, {64, kTileDepth / 2});
  }
  const Kernel kernel = KernelFor(call.type, call.transposed, plan.tile_columns);
  void* arguments[] = {&p};
  Check(cudaLaunchKernel(kernel.function, dim3(BlocksOf(kernel)), dim3(kThreads), arguments,
                         kernel.shared_bytes, stream));
}

void LoadFusedKernels() {
  int device, generation;
  Check(cudaGetDevice(&device));
  Check(cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device));
  if (generation != 9) return;
  for (const ElementType type : {ElementType::kBF16, ElementType::kF16}) {
    for (const bool transposed : {false, true}) {
      for (const int columns : {128, 192, 256}) BlocksOf(KernelFor(type, transposed, columns));
    }
  }
}

}  // namespace jax_intranode
