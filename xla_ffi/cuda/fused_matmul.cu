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

// What a tile of products, and of operands, is made of, and what travels: 64 columns of 128 rows.
// Operands are in the layout that matrix instructions and tensor maps call swizzled by 128 bytes.
constexpr uint32_t kItem = kTileRows * kTileDepth * kMatmulElementBytes;
static_assert(kItem == kChunkBytes);
// A half of an item, which is what a matrix instruction multiplies or leaves of it.
constexpr uint32_t kHalf = kItem / 2;
constexpr uint32_t kHalfRows = kTileRows / 2;

// Warps of a block that send, and times four rows that each has under way. No more: what is sent
// faster than the link takes it fills the ways to the memory, and the operands of the warps that
// multiply come late. (With three warps and eight times all of it took up to 18 % longer.)
constexpr int kSenders = 2;
constexpr int kRowsAtOnce = 2;      // of an all-gather
constexpr int kProductsAtOnce = 4;  // for a sum
constexpr int kKeptAtOnce = 8;      // the warp that copies what has arrived

// So many clocks for each item of K a warpgroup takes to store 16 bytes of a thread, where products
// go to peers directly, for the same reason: three quarters of what the matrix units take meanwhile
// to multiply as much for the other one. (Stored at once it took up to 5 % longer.)
constexpr int kPaceOfItem = 24;

// Of half an item of products, in scratch and in a ring, a thread has words of its own: as the
// matrix instructions leave them, rounded, four at a time beside those of the next thread.
constexpr int kWords = 16;
constexpr int kPacks = kWords / 4;
constexpr int kPacksBytes = 128 * sizeof(Pack);  // of a warpgroup
static_assert(kPacks * kPacksBytes == kHalf);

// What multiplies: a matrix that x is multiplied with, or one of a sum of products, and its
// operand.
struct MatrixOfCall {
  CUtensorMap x, w;
  CUtensorMap product;  // that of a sum is the first one's
  int first_tile;       // of its columns, among those of all products
  int end;              // of its depth, among those of all that are summed
};

// A derivative by a matrix: what transposed rows are multiplied with, and itself.
struct DerivativeOfCall {
  CUtensorMap w;
  CUtensorMap product;
  int first_tile;  // of its columns, among those of all derivatives
};

struct Parameters {
  MatrixOfCall of[kMaxMatrices];
  DerivativeOfCall derivative[kMaxMatrices];
  CUtensorMap beside;  // what is transposed
  DeviceGroup group;
  char* ring[kMaxRanks];  // each rank's, as this rank addresses it
  size_t data_offset;     // in a ring
  char* scratch;
  const char* rows_of_x;
  char* gathered;  // or null
  int products;
  bool sums;                         // reduce-scatter
  int rows;                          // of a shard's arrays
  int row_bytes;                     // of x, in an all-gather
  int depth;                         // items of a row tile, of all contracted dimensions
  int tiles_of_array, tiles, pairs;  // of rows, of a shard
  int column_tiles;
  int group_pairs, fewer_pairs, fewer_sent_pairs, fewer_pairs_after;
  int part;
  int derivatives, beside_tiles, beside_pairs, beside_columns, pairs_before, beside_after;
  // Whether products go to peers directly, and how many clocks a warpgroup takes for 16 bytes of a
  // thread then.
  bool direct;
  uint32_t pace;
};
static_assert(sizeof(Parameters) <= 4096);

constexpr int kThreads = 3 * 128;
// A block gets so many a thread. Warpgroups that ask for more of them in all wait for ever.
constexpr int kRegisters = 168;
constexpr int kMaxClusters = 72;  // a whole Hopper chip has 144 multiprocessors

// Shared memory, from a multiple of 1024: stages, each an item of rows and then what they are
// multiplied with; buffers, each for half an item of products, of each warpgroup that multiplies;
// barriers; counts; lists that the cluster has drawn, of which there is one more at most than
// clusters.
template <int kColumns>
struct Layout {
  // Whether the warpgroups take turns at whole tiles, so that one multiplies while the other
  // stores. The products of wider tiles have room in the registers of both only: each has half of
  // the rows.
  static constexpr bool kTurns = kColumns <= 192;
  static constexpr int kHalves = kTurns ? 2 : 1;                 // of a tile, that a warpgroup has
  static constexpr uint32_t kNextHalf = kTurns ? kHalf : kItem;  // from one half item to its next

  // Of a thread that multiplies, of which the products take as many as a tile has columns, or half
  // as many; and what is left to one of the other warps.
  static constexpr int kRegistersOfMultipliers = kColumns == 192 ? 224 : 200;
  static constexpr int kRegistersOfOthers = 3 * kRegisters - 2 * kRegistersOfMultipliers;

  static constexpr int kItems = ItemsOfTile(kColumns);
  // Whether items come out even, as the ways of products to peers need it.
  static constexpr bool kSums = kColumns % kTileDepth == 0;
  // The first column, in a tile, of an item of products. Where items don't come out even the last
  // one has columns of the one before, too: these are stored twice, the same bits.
  JIN_FN static constexpr int Column(int item) {
    return Smaller(item * kTileDepth, kColumns - kTileDepth);
  }

  static constexpr uint32_t kB = kItems * kItem / 2;
  static constexpr uint32_t kStage = kItem + kB;
  static constexpr int kStages = kColumns == 128 ? 6 : kColumns == 192 ? 5 : 4;
  static constexpr uint32_t kFirstBuffer = kStages * kStage;
  static constexpr int kBuffers = kColumns == 192 ? 1 : 2;
  static constexpr uint32_t kBarriers = kFirstBuffer + 2 * kBuffers * kHalf;
  static constexpr uint32_t kStored = kBarriers + 8 * 2 * kStages;
  static constexpr uint32_t kDrawn = kStored + 8;
  static constexpr uint32_t kBytes = kDrawn + 4 * (kMaxClusters + 1) + 1024;
  static_assert(kBytes <= 227 << 10);
};

// That of so many matrices, or derivatives, whose product a column tile belongs to.
template <class Of>
JIN_FN const Of& OfColumn(const Of* of, int count, int column) {
  while (--count > 0 && column >= of[1].first_tile) ++of;
  return *of;
}
// Of a sum the first.
JIN_FN const MatrixOfCall& MatrixOf(const Parameters& p, int column) {
  return OfColumn(p.of, p.products, column);
}
JIN_FN const DerivativeOfCall& DerivativeOf(const Parameters& p, int column) {
  return OfColumn(p.derivative, p.derivatives, column);
}

// Where 16 bytes of a row lie in half an item.
JIN_FN int Offset(int row, int column) { return row * 128 + ((column ^ row) & 7) * 16; }

JIN_FN char* Data(const Parameters& p, int rank, int place) {
  return p.ring[rank] + p.data_offset + static_cast<int64_t>(place) * kItem;
}
JIN_FN uint32_t* Flag(const Parameters& p, int rank, int place) {
  return reinterpret_cast<uint32_t*>(p.ring[rank] + kRingHeaderBytes) + place;
}
JIN_FN RingHeader* Ring(const Parameters& p) {
  return reinterpret_cast<RingHeader*>(p.ring[p.group.rank]);
}
JIN_FN Signals* SignalsAt(const Parameters& p, int rank) {
  return reinterpret_cast<Signals*>(p.group.region[rank] + kHeaderBytes / 2);
}

JIN_FN uint32_t LoadAcquire(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
JIN_FN uint64_t LoadAcquire(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
JIN_FN void StoreRelaxed(uint64_t* to, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
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

// Of this multiprocessor, modulo 2^32.
JIN_FN uint32_t Clock() { return static_cast<uint32_t>(clock()); }

// Has a value computed once, not at each use.
JIN_FN uint32_t InRegister(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
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
  JIN_FN uint32_t Buffer(int group) const {
    return base + Place::kFirstBuffer + group * Place::kBuffers * kHalf;
  }
  // Units, of those that are sent, of which this warpgroup has stored what it multiplied.
  JIN_FN uint32_t Stored(int group) const { return base + Place::kStored + 4 * group; }

  // Where the k-th list that the cluster draws is written, and the list, when it has been.
  JIN_FN uint32_t Drawn(int k) const { return base + Place::kDrawn + 4 * k; }
  JIN_FN int List(int k) const {
    uint32_t drawn;
    while ((drawn = LoadSharedRelaxed(Drawn(k))) == 0) {
    }
    return static_cast<int>(drawn) - 1;
  }

  JIN_FN int Clusters() const { return gridDim.x / kClusterSize; }
  // Whether all of unit k has been stored, of those that are sent.
  JIN_FN bool IsStored(uint32_t k) const {
    const auto has = [&](int group, uint32_t units) {
      return LoadSharedAcquire(Stored(group)) >= units;
    };
    return Place::kTurns ? has(k % 2, k / 2 + 1) : has(0, k + 1) && has(1, k + 1);
  }
  JIN_FN bool Here(int place) const {
    return LoadAcquire(Flag(p, p.group.rank, place)) == operation;
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
JIN_FN void TellDrawn(const Block<kColumns>& b, int k, uint32_t drawn) {
  b.Thread().Admit(drawn >= ListsOfSent(b.p, b.Clusters()) + b.Clusters(), 0);
  for (int rank = 0; rank < kClusterSize; ++rank) StoreToCluster(b.Drawn(k), rank, drawn + 1);
}

// Waits until item k of `count` at a place has arrived. A warp, of which each lane looks at one of
// 32. Returns how many of them have.
template <int kColumns>
JIN_FN int AwaitItems(const Block<kColumns>& b, int place, int k, int count, int of_rank) {
  DeviceThread thread = b.Thread();
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
JIN_FN void AwaitTile(const Block<kColumns>& b, int tile, int column) {
  DeviceThread thread = b.Thread();
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
}

// Waits until the items of a column tile of row tile `tile`, counted over all shards, have arrived.
// A warp, of which each lane looks at one, of several row tiles. Returns up to which tile they
// have.
template <int kColumns>
JIN_FN int AwaitColumns(const Block<kColumns>& b, int tile, int column) {
  DeviceThread thread = b.Thread();
  constexpr int kItems = Layout<kColumns>::kItems;
  constexpr int kTiles = 32 / kItems;
  const Parameters& p = b.p;
  const int lane = threadIdx.x & 31;
  const int looked_at = tile + lane / kItems;
  const int step = looked_at / p.tiles;
  const int depth = column * kItems + lane % kItems;
  const int place = PlaceOfItem(p, step, looked_at - step * p.tiles, depth);
  const bool awaits = lane / kItems < kTiles && step < p.group.size && depth < p.depth;
  for (;;) {
    const uint32_t missing = ~__ballot_sync(~0u, !awaits || b.Here(place));
    const int arrived = missing == 0 ? kTiles : (__ffs(missing) - 1) / kItems;
    if (arrived > 0) {
      __syncwarp();
      ProxyFence();
      return tile + arrived;
    }
    thread.Wait(0, RankAfter(p, tile / p.tiles));
  }
}

// Feeds the stages. One warp.
template <bool kRowsOfB, bool kBeside, int kColumns>
JIN_FN void Feed(const Block<kColumns>& b) {
  using Place = Layout<kColumns>;
  const Parameters& p = b.p;
  const uint32_t side = RankInCluster();
  // Where B lies by rows whole items are loaded, the last one wider than what is left of the tile.
  constexpr uint32_t kOfB = kRowsOfB ? Place::kB : kColumns * kTileDepth * 2;
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
      TellDrawn(b, units.lists(), DrawUnits(p));
    }
    __syncwarp();
    const Unit unit = UnitOf(p, units.number());
    const int tile = kClusterSize * unit.pair + side;
    if (kBeside && unit.beside) {
      // Rows of all shards, by halves of a row tile: 128 columns of what is transposed, of each
      // block its own, and those of the column tile, for both. Without a division: a stage's turn
      // comes too soon for it.
      const bool real = tile < p.beside_tiles;  // the last pair may have one tile only
      const DerivativeOfCall& of = DerivativeOf(p, unit.column);
      const int first_item = (unit.column - of.first_tile) * Place::kItems;
      int arrived = 0;  // of all shards' row tiles
      for (int step = 0; step < p.group.size; ++step) {
        const bool arrives = !p.sums && step > 0;
        const int rank = p.sums ? step : RankAfter(p, step);
        const char* item = Data(p, p.group.rank, PlaceOfItem(p, step, 0, first_item));
        RowTile rows = {0, 0};
        for (int at = 0; at < p.tiles; ++at) {
          if (arrives && step * p.tiles + at >= arrived) {
            arrived = AwaitColumns(b, step * p.tiles + at, unit.column);
          }
          for (int half = 0; half < 2; ++half) {
            if (Elected()) {
              const int row = rows.row + half * kHalfRows;
              const int array = rows.array * p.group.size + rank;
              const uint32_t full = b.Full(stage), a = b.A(stage);
              BarrierWait(b.Empty(stage), parity);
              BarrierExpect(full, real ? Place::kStage : Place::kB);
              if (real) {
                Load(a, p.beside, tile * kTileRows, row, array, full);
                Load(a + kHalf, p.beside, tile * kTileRows + 64, row, array, full);
              }
              const uint32_t to = b.B(stage) + side * (kHalf / 2);
              JIN_UNROLL
              for (int i = 0; i < Place::kItems; ++i) {
                if (arrives) {
                  // Columns that there are not are multiplied with some that there are, in vain.
                  LoadToBoth(to + i * kHalf,
                             item + Smaller(i, p.depth - 1 - first_item) * int64_t{kItem} +
                                 half * kHalf + side * (kHalf / 2),
                             kHalf / 2, full);
                } else {
                  LoadToBoth(to + i * kHalf, of.w, (first_item + i) * 64,
                             row + side * (kHalfRows / 2), p.sums ? array : rows.array, full);
                }
              }
            }
            advance();
          }
          item += p.depth * int64_t{kItem};
          rows.row += kTileRows;
          if (rows.row == p.tiles_of_array * kTileRows) rows = {rows.array + 1, 0};
        }
      }
      continue;
    }
    const bool real = tile < p.tiles;  // the last pair may have one tile only
    const RowTile rows = RowTileOf(p, tile);
    const int owner = Owner(p, unit.step);
    const bool arrives = !p.sums && unit.step > 0;
    const int array = p.sums ? rows.array * p.group.size + owner : rows.array;
    const int place = PlaceOfItem(p, unit.step, tile, 0);
    const MatrixOfCall* of = &MatrixOf(p, unit.column);
    const int column = (unit.column - of->first_tile) * kColumns;
    int arrived = arrives ? 0 : p.depth;
    int first = 0;  // of what is multiplied now, the first depth
    for (int k = 0; k < p.depth; ++k) {
      if (k == of->end) {
        first = k;
        ++of;
      }
      const int at = (k - first) * kTileDepth;
      if (real && k >= arrived) arrived = AwaitItems(b, place, k, p.depth, owner);
      if (Elected()) {
        const uint32_t full = b.Full(stage), a = b.A(stage), to = b.B(stage);
        BarrierWait(b.Empty(stage), parity);
        BarrierExpect(full, real ? kItem + kOfB : kOfB);
        if (real && arrives) {
          Load(a, Data(p, p.group.rank, place + k), kItem, full);
        } else if (real) {
          Load(a, of->x, at, rows.row, array, full);
          Load(a + kHalf, of->x, at, rows.row + kHalfRows, array, full);
        }
        // Each block of the cluster loads half of what both need.
        if (kRowsOfB) {
          JIN_UNROLL
          for (int n = 0; n < kColumns; n += 64) {
            LoadToBoth(to + n * kTileDepth * 2 + side * 4096, of->w, column + n, at + side * 32,
                       full);
          }
        } else {
          LoadToBoth(to + side * (kOfB / 2), of->w, at, column + side * (kColumns / 2), full);
        }
      }
      advance();
    }
  }
}

// Until the peer lends its ring. Returns the number of its operation there.
template <int kColumns>
JIN_FN uint32_t AwaitGrant(const Block<kColumns>& b, int peer, uint32_t operations) {
  DeviceThread thread = b.Thread();
  const uint64_t* const word = &SignalsAt(b.p, b.p.group.rank)->lent[peer];
  uint64_t granted;
  while (static_cast<uint32_t>(granted = LoadAcquire(word)) != operations + 1) {
    thread.Wait(0, peer);
  }
  return static_cast<uint32_t>(granted >> 32);
}

// Copies an item by a warp, four rows at a time, of which each lane has 16 bytes: `load(n)` reads
// those of the n-th four rows, `store(n, pack)` writes them. Loads `kAtOnce` times four rows before
// it stores them, and calls `meanwhile` when the first loads are under way.
template <int kAtOnce, class LoadRows, class StoreRows, class Meanwhile>
JIN_FN void CopyItem(LoadRows&& load, StoreRows&& store, Meanwhile&& meanwhile) {
  JIN_UNROLL
  for (int first = 0; first < kTileRows / 4; first += kAtOnce) {
    Pack packs[kAtOnce];
    JIN_UNROLL
    for (int i = 0; i < kAtOnce; ++i) packs[i] = load(first + i);
    if (first == 0) meanwhile();
    JIN_UNROLL
    for (int i = 0; i < kAtOnce; ++i) store(first + i, packs[i]);
  }
}

// What a warp sends to peers. They are told of an item by its flag when the next ones are under
// way, for the fence before flags takes a while: of two items at once, but of each where the sender
// is in a hurry, for peers wait for nothing else.
template <int kAtOnce, int kColumns>
class Courier {
 public:
  JIN_FN Courier(const Block<kColumns>& b, uint32_t operations) : b_(b), operations_(operations) {}

  // Until the receiver of what is sent at a step lends its ring.
  JIN_FN void AwaitRing(int step) {
    if (granted_ >> step & 1) return;
    Tell();  // before it waits
    granted_ |= 1u << step;
    const uint32_t number = AwaitGrant(b_, Receiver(b_.p, step), operations_);
    if (Lane() == step) number_of_step_ = number;
  }

  // Copies an item to its place: see CopyItem.
  template <class LoadRows, class StoreRows>
  JIN_FN void Send(int step, int place, bool in_a_hurry, LoadRows&& load, StoreRows&& store) {
    const int peer = Receiver(b_.p, step);
    char* const to = Data(b_.p, peer, place);
    CopyItem<kAtOnce>(
        load, [&](int n, const Pack& pack) { store(to, n, pack); },
        [&] {
          if (untold_ == kToldAtOnce || in_a_hurry) Tell();
        });
    const uint32_t number = __shfl_sync(~0u, number_of_step_, step);
    if (Lane() == untold_) {
      flag_ = Flag(b_.p, peer, place);
      number_ = number;
    }
    ++untold_;
  }

  JIN_FN void Tell() {
    __syncwarp();
    if (Lane() < untold_) {
      SystemFence();
      StoreWord(flag_, number_);
    }
    untold_ = 0;
  }

 private:
  static constexpr int kToldAtOnce = 2;

  JIN_FN int Lane() const { return threadIdx.x % 32; }

  const Block<kColumns>& b_;
  const uint32_t operations_;
  uint32_t granted_ = 0;         // steps
  uint32_t number_of_step_ = 0;  // that is the lane's: the receiver's operation
  // Items that peers have not been told of: of each a lane has the flag, and what it is set to.
  int untold_ = 0;
  uint32_t* flag_ = nullptr;
  uint32_t number_ = 0;
};

// A lane's part of an item of the operand, or of the gathered one: of each four rows 16 bytes.
struct RowsOfLane {
  int64_t offset;  // of the first, in bytes
  int rows_left;   // from there on, if the item's columns are there at all
  int four_rows;   // bytes

  JIN_FN RowsOfLane(const Parameters& p, const RowTile& rows, int64_t array, int depth) {
    const int lane = threadIdx.x & 31;
    const int row = rows.row + lane / 8;
    const int byte = depth * kTileDepth * 2 + lane % 8 * 16;
    offset = (array * p.rows + row) * p.row_bytes + byte;
    rows_left = byte < p.row_bytes ? p.rows - row : 0;
    four_rows = 4 * p.row_bytes;
  }
  JIN_FN bool Has(int n) const { return 4 * n < rows_left; }
  JIN_FN int64_t At(int n) const { return offset + static_cast<int64_t>(n) * four_rows; }
};

// Where it lies in a ring, where rows are as in shared memory.
struct ItemOfLane {
  int first = Offset((threadIdx.x & 31) / 8, threadIdx.x % 8);
  JIN_FN int At(int n) const { return (first ^ n % 2 * 64) + n * 512; }
};

// Sends items of the rank's shard to all peers, and copies them into the gathered x if that is
// kept: item after item that the warp draws, so that they arrive in their order. A warp.
template <bool kKeeps, int kColumns>
JIN_FN void SendItems(const Block<kColumns>& b, uint32_t operations) {
  const Parameters& p = b.p;
  const int items = Items(p);
  const auto draw = [&] { return threadIdx.x % 32 == 0 ? atomicAdd(&Ring(p)->drawn_items, 1) : 0; };
  const ItemOfLane in_ring;
  Courier<kRowsAtOnce, kColumns> courier(b, operations);
  int next = draw();
  for (int i; (i = __shfl_sync(~0u, next, 0)) < items;) {
    next = draw();  // on its way while this one is copied
    const Item item = ItemOf(p, i);
    if (item.tile >= p.tiles) continue;
    courier.AwaitRing(item.step);
    const RowTile rows = RowTileOf(p, item.tile);
    const RowsOfLane from(p, rows, rows.array, item.depth);
    const RowsOfLane own(p, rows, static_cast<int64_t>(rows.array) * p.group.size + p.group.rank,
                         item.depth);
    const bool one_of_the_last = i + 2 * kSenders * static_cast<int>(gridDim.x) >= items;
    courier.Send(
        item.step, PlaceOfItem(p, item.step, item.tile, item.depth), one_of_the_last,
        [&](int n) { return from.Has(n) ? LoadPack(p.rows_of_x + from.At(n)) : Pack{}; },
        [&](char* to, int n, const Pack& pack) {
          *reinterpret_cast<Pack*>(to + in_ring.At(n)) = pack;
          if (kKeeps && item.step == 1 && own.Has(n)) {
            *reinterpret_cast<Pack*>(p.gathered + own.At(n)) = pack;
          }
        });
  }
  courier.Tell();
}

// Copies the block's items of the peers' shards into the gathered x, as they arrive. A warp.
template <int kColumns>
JIN_FN void KeepItems(const Block<kColumns>& b) {
  const Parameters& p = b.p;
  const int items = Items(p);
  const ItemOfLane in_ring;
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item = ItemOf(p, i);
    if (item.tile >= p.tiles) continue;
    const int owner = RankAfter(p, item.step);
    const RowTile rows = RowTileOf(p, item.tile);
    const int place = PlaceOfItem(p, item.step, item.tile, item.depth);
    AwaitItems(b, place, 0, 1, owner);
    const RowsOfLane to(p, rows, static_cast<int64_t>(rows.array) * p.group.size + owner,
                        item.depth);
    const char* const from = Data(p, p.group.rank, place);
    CopyItem<kKeptAtOnce>([&](int n) { return LoadPack(from + in_ring.At(n)); },
                          [&](int n, const Pack& pack) {
                            if (to.Has(n)) *reinterpret_cast<Pack*>(p.gathered + to.At(n)) = pack;
                          },
                          [] {});
  }
}

// Sends the block's tiles of products to their owners, of `kSenders` items this warp one. A warp.
template <int kColumns>
JIN_FN void SendTiles(const Block<kColumns>& b, uint32_t operations, int sender) {
  // Of each unit the warp sends something: who sends nothing at a step may find the peer's ring
  // lent to the operation after this one.
  static_assert(Layout<kColumns>::kItems >= kSenders);
  const Parameters& p = b.p;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;  // units
  int items = 0;        // modulo `kSenders`, those before
  Courier<kProductsAtOnce, kColumns> courier(b, operations);
  UnitsOfCluster<Block<kColumns>> units(b);
  while (units.Next() && units.is_sent()) {
    const Unit unit = UnitOf(p, units.number());
    const int tile = kClusterSize * unit.pair + RankInCluster();
    const uint32_t k = before++;
    if (tile >= p.tiles) continue;
    courier.AwaitRing(unit.step);
    const auto is_stored = [&] { return __all_sync(~0u, b.IsStored(k)); };  // for all lanes or none
    if (!is_stored()) {
      courier.Tell();  // before it waits
      while (!is_stored()) __nanosleep(100);
    }
    const bool one_of_the_last = units.number() + 2 * b.Clusters() >= UnitsSent(p);
    for (int item = 0; item < Layout<kColumns>::kItems; ++item) {
      const bool sends = items == sender;
      if (++items == kSenders) items = 0;
      if (!sends) continue;
      const int place = PlaceOfTile<kColumns>(p, unit.step, tile, unit.column) + item;
      const char* const from = p.scratch + static_cast<int64_t>(place) * kItem + lane * 16;
      courier.Send(
          unit.step, place, one_of_the_last, [&](int n) { return LoadPack(from + n * 512); },
          [&](char* to, int n, const Pack& pack) {
            *reinterpret_cast<Pack*>(to + lane * 16 + n * 512) = pack;
          });
    }
  }
  courier.Tell();
}

// Tells owners of the block's tiles of products, which the warps that multiply have stored there
// themselves. A warp, of the units that are its turn.
template <int kColumns>
JIN_FN void TellTiles(const Block<kColumns>& b, uint32_t operations, int sender) {
  constexpr int kItems = Layout<kColumns>::kItems;
  const Parameters& p = b.p;
  const int lane = threadIdx.x % 32;
  UnitsOfCluster<Block<kColumns>> units(b);
  for (uint32_t k = 0; units.Next() && units.is_sent(); ++k) {
    const Unit unit = UnitOf(p, units.number());
    const int tile = kClusterSize * unit.pair + RankInCluster();
    if (static_cast<int>(k % kSenders) != sender || tile >= p.tiles) continue;
    while (!__all_sync(~0u, b.IsStored(k))) __nanosleep(100);  // for all lanes or none
    const int peer = Receiver(p, unit.step);
    // It has been lent; and not yet to the next operation: no lane tells before all have looked.
    const uint32_t number = AwaitGrant(b, peer, operations);
    __syncwarp();
    if (lane < kItems) {
      SystemFence();
      StoreWord(Flag(p, peer, PlaceOfTile<kColumns>(p, unit.step, tile, unit.column) + lane),
                number);
    }
    __syncwarp();
  }
}

// Sums half items of a tile, this thread's words: those that peers have sent and this rank's own,
// in rank order, in float32, and rounds once. What peers have sent is loaded some time before it is
// added, of every other peer into the same registers: to move what is still on its way would be to
// wait for it.
template <class Type, int kColumns, int kHalfItems>
class Sum {
 public:
  JIN_FN Sum(const Parameters& p, int tile, int column, int first_half)
      : p_(p), tile_(tile), column_(column), offset_(first_half * kHalf + threadIdx.x % 128 * 16) {
    Load(&even_);
    Load(&odd_);
  }

  // In place of this rank's words of the next half item the sum's.
  JIN_FN void Add(uint32_t (&words)[kWords]) {
    float sum[2 * kWords];
    JIN_UNROLL
    for (float& value : sum) value = -0.f;  // adding to it changes nothing, not even a sign
    const auto add = [&](int i, uint32_t word) {
      float low, high;
      Type::UnpackPair(word, &low, &high);
      sum[2 * i] += low;
      sum[2 * i + 1] += high;
    };
    const auto add_own = [&] {
      JIN_UNROLL
      for (int i = 0; i < kWords; ++i) add(i, words[i]);
    };
    const auto add_peer = [&](int peer, Ahead* ahead) {
      if (peer == p_.group.rank) add_own();
      JIN_UNROLL
      for (int i = 0; i < kWords; ++i) add(i, ahead->packs[i / 4].word[i % 4]);
      Load(ahead);
    };
#pragma unroll 1
    for (int peer = 0; peer < Peers(); peer += 2) {
      add_peer(peer, &even_);
      if (peer + 1 < Peers()) add_peer(peer + 1, &odd_);
    }
    if (p_.group.rank == Peers()) add_own();
    JIN_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = Type::RoundPair(sum[2 * i], sum[2 * i + 1]);
  }

 private:
  // Words on their way, of every other peer in rank order; and which half item's and which peer's
  // come next.
  struct Ahead {
    int peer, half = 0;
    Pack packs[kPacks];
  };

  JIN_FN int Peers() const { return p_.group.size - 1; }

  // The next ones, if there are any.
  JIN_FN void Load(Ahead* ahead) {
    if (ahead->peer >= Peers()) {
      ahead->peer %= 2;
      ++ahead->half;
    }
    if (ahead->half >= kHalfItems || ahead->peer >= Peers()) return;
    const int rank = ahead->peer + (ahead->peer >= p_.group.rank ? 1 : 0);
    const int place = PlaceOfTile<kColumns>(p_, StepOfSender(p_, rank), tile_, column_);
    const char* const from =
        Data(p_, p_.group.rank, place) + offset_ + ahead->half * Layout<kColumns>::kNextHalf;
    JIN_UNROLL
    for (int i = 0; i < kPacks; ++i) ahead->packs[i] = LoadPack(from + i * kPacksBytes);
    ahead->peer += 2;
  }

  const Parameters& p_;
  const int tile_, column_, offset_;
  Ahead even_{0}, odd_{1};
};

// Multiplies: a warpgroup. It takes turns with the other one at the cluster's units, and what it
// has multiplied it stores while the other one multiplies; or it has half of each unit's rows.
template <class Type, bool kRowsOfB, bool kBeside, int kColumns>
JIN_FN void Multiply(const Block<kColumns>& b, uint32_t operations) {
  using Place = Layout<kColumns>;
  constexpr int kHalves = Place::kHalves;
  constexpr int kHalfItems = kHalves * Place::kItems;
  const Parameters& p = b.p;
  const int group = threadIdx.x / 128 - 1;
  const int thread = threadIdx.x % 128;
  const int lane = threadIdx.x % 32;
  const int first_half = Place::kTurns ? 0 : group;
  const uint32_t first_a = InRegister(TileDescriptor(b.A(0) + first_half * kHalf));
  const uint32_t first_w = InRegister(TileDescriptor(b.B(0)));
  const uint32_t first_empty = InRegister(OfCluster(b.Empty(0), thread % kClusterSize));
  const auto sync = [&] { group == 0 ? NamedSync<1, 128>() : NamedSync<2, 128>(); };
  const auto release = [&](int stage) {  // a thread for each block of the cluster
    if (thread < kClusterSize) BarrierArrive(first_empty + 8 * stage);
  };
  uint32_t fed = 0;     // stages, before those of the unit
  uint32_t stored = 0;  // units, of those that are sent
  uint32_t lent = 0;    // rings, by the step at which this rank sends there
  UnitsOfCluster<Block<kColumns>> units(b);
  const auto depth = [&] {
    return kBeside && IsBeside(p, units.number()) ? StagesBeside(p) : p.depth;
  };
  for (int turn = 0; units.Next(); turn ^= 1, fed += depth()) {
    if (Place::kTurns && turn != group) continue;
    const Unit unit = UnitOf(p, units.number());  // in time: it takes a while
    float d[kHalves][kColumns / 2];
    JIN_UNROLL
    for (auto& half : d) {
      JIN_UNROLL
      for (float& value : half) value = 0;
    }
    // Not before the other warpgroup has seen the last stage of its tile: by a parity a barrier's
    // phase can be told from the next one only, so a warp must not wait for a later one.
    if (Place::kTurns && fed > 0) group == 0 ? NamedSync<3, 256>() : NamedSync<4, 256>();
    int stage = fed % Place::kStages, multiplied = 0;
    uint32_t parity = fed / Place::kStages & 1;
    const auto multiply = [&]<bool kByColumns, bool kByRows>(int stages) {
      for (int k = 0; k < stages; ++k) {
        BarrierWait(b.Full(stage), parity);
        const uint32_t a = first_a + stage * DescriptorOffset(Place::kStage);
        const uint32_t w = first_w + stage * DescriptorOffset(Place::kStage);
        MatmulFence();
        JIN_UNROLL
        for (int i = 0; i < kTileDepth / 16; ++i) {
          JIN_UNROLL
          for (int half = 0; half < kHalves; ++half) {
            Matmul16<std::is_same_v<Type, BF16>, kByColumns, kByRows>(
                d[half], a + half * DescriptorOffset(kHalf) + (kByColumns ? 128 : 2) * i,
                w + (kByRows ? 128 : 2) * i);
          }
        }
        MatmulCommit();
        if (k > 0) {
          MatmulWait<1>();
          release(multiplied);
        }
        multiplied = stage;
        if (++stage == Place::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    };
    if (kBeside && unit.beside) {
      multiply.template operator()<true, true>(StagesBeside(p));
    } else {
      multiply.template operator()<false, kRowsOfB>(p.depth);
    }
    if (Place::kTurns && UnitsOfCluster<Block<kColumns>>(units).Next()) {
      group == 0 ? NamedArrive<4, 256>() : NamedArrive<3, 256>();
    }
    MatmulWait<0>();
    JIN_UNROLL
    for (auto& half : d) MatmulDone(half);
    release(multiplied);

    const int tile = kClusterSize * unit.pair + RankInCluster();
    const bool real = tile < (kBeside && unit.beside ? p.beside_tiles : p.tiles);
    // Half items of the warpgroup: of its first item one or two halves, then of the next one.
    uint32_t words[kHalfItems][kWords];
    JIN_UNROLL
    for (int i = 0; i < kHalfItems; ++i) {
      JIN_UNROLL
      for (int k = 0; k < kWords; ++k) {
        const float* const pair = &d[i % kHalves][Place::Column(i / kHalves) / 2 + 2 * k];
        words[i][k] = Type::RoundPair(pair[0], pair[1]);
      }
    }
    if (Place::kSums && units.is_sent()) {
      if (real) {
        const int place = PlaceOfTile<kColumns>(p, unit.step, tile, unit.column);
        char* to = p.scratch + place * int64_t{kItem};
        if (p.direct) {
          const int peer = Receiver(p, unit.step);
          if (!(lent >> unit.step & 1)) {
            lent |= 1u << unit.step;
            if (thread == 0) AwaitGrant(b, peer, operations);
            sync();
          }
          to = Data(p, peer, place);
        }
        to += first_half * kHalf + thread * sizeof(Pack);
        const uint32_t began = Clock();
        JIN_UNROLL
        for (int i = 0; i < kHalfItems; ++i) {
          JIN_UNROLL
          for (int k = 0; k < kWords; k += 4) {
            while (p.pace > 0 && Clock() - began < (i * kPacks + k / 4) * p.pace) {
            }
            *reinterpret_cast<Pack*>(to + i * Place::kNextHalf + k / 4 * kPacksBytes) =
                Pack{{words[i][k], words[i][k + 1], words[i][k + 2], words[i][k + 3]}};
          }
        }
      }
      sync();
      if (thread == 0) StoreSharedRelease(b.Stored(group), ++stored);
      continue;
    }
    if (!real) continue;
    const CUtensorMap* product;
    int column;
    const auto goes_to = [&](const auto& of) {
      product = &of.product;
      column = (unit.column - of.first_tile) * kColumns;
    };
    RowTile rows = {0, tile * kTileRows};
    if (kBeside && unit.beside) {
      goes_to(DerivativeOf(p, unit.column));
    } else {
      goes_to(MatrixOf(p, unit.column));
      rows = RowTileOf(p, tile);
      if (!p.sums) rows.array = rows.array * p.group.size + Owner(p, unit.step);
    }
    // Where in half an item the thread's row is of the four 8 x 8 matrices that a warp stores at
    // once: 16 rows of 16 columns.
    const uint32_t offset = Offset(thread / 32 * 16 + lane % 16, lane / 16);
    // Half an item by way of shared memory, from where a bulk copy takes it.
    const auto store = [&](int i) {
      const uint32_t buffer = b.Buffer(group) + i % Place::kBuffers * kHalf;
      if (thread == 0) StoreWaitRead<Place::kBuffers - 1>();  // the buffer has been read
      sync();
      JIN_UNROLL
      for (int k = 0; k < kWords; k += 4) {
        StoreMatrices(buffer + (offset ^ k * 8),
                      {words[i][k], words[i][k + 1], words[i][k + 2], words[i][k + 3]});
      }
      SharedProxyFence();
      sync();
      if (thread == 0) {
        Store(*product, column + Place::Column(i / kHalves),
              rows.row + (first_half + i % kHalves) * kHalfRows, rows.array, buffer);
        StoreCommit();
      }
    };
    static_assert(kHalfItems % Place::kBuffers == 0);
    if (!Place::kSums || !p.sums || (kBeside && unit.beside)) {
      JIN_UNROLL
      for (int i = 0; i < kHalfItems; ++i) store(i);
      continue;
    }
    if (thread < 32) AwaitTile(b, tile, unit.column);
    sync();
    Sum<Type, kColumns, kHalfItems> sum(p, tile, unit.column, first_half);
    JIN_UNROLL
    for (int i = 0; i < kHalfItems; ++i) {
      sum.Add(words[i]);
      store(i);
    }
  }
  if (thread == 0) StoreWait<0>();
}

template <class Type, bool kRowsOfB, bool kBeside, int kColumns>
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
      // Of each block the warpgroup whose turn it is, or both.
      BarrierInit(b.Empty(stage), (Place::kTurns ? 1 : 2) * kClusterSize);
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
    KeepRegisters<Place::kRegistersOfOthers>();
    if (warp == 0) {
      if (draws) {
        if (drawn == 0) b.Thread().Admit(0, closed);
        TellDrawn(b, 0, drawn);
      }
      const int step = 1 + threadIdx.x;
      if (__shfl_sync(~0u, draws && drawn == 0, 0) && step < p.group.size) {  // it begins
        SystemFence();
        StoreRelaxed(&SignalsAt(p, RankAfter(p, step))->lent[p.group.rank],
                     static_cast<uint64_t>(b.operation) << 32 | (operations + 1));
      }
      __syncwarp();
      Feed<kRowsOfB, kBeside>(b);
    } else if (warp <= kSenders) {
      if (Place::kSums && p.sums) {
        p.direct ? TellTiles(b, operations, warp - 1) : SendTiles(b, operations, warp - 1);
      } else {
        p.gathered == nullptr ? SendItems<false>(b, operations) : SendItems<true>(b, operations);
      }
    } else if (p.gathered != nullptr) {
      KeepItems(b);
    }
  } else {
    TakeRegisters<Place::kRegistersOfMultipliers>();
    Multiply<Type, kRowsOfB, kBeside>(b, operations);
  }
  __syncwarp();
  ClusterSync();  // nobody leaves while another block may still copy into its memory
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&ring->left, 1) == gridDim.x - 1) {
      ring->left = 0;
      ring->drawn_items = 0;
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

template <class Type, bool kRowsOfB, bool kBeside, int kColumns>
Kernel KernelOf() {
  return {
      reinterpret_cast<const void*>(&jax_intranode_fused_matmul<Type, kRowsOfB, kBeside, kColumns>),
      Layout<kColumns>::kBytes};
}
template <class Type, bool kRowsOfB>
Kernel KernelFor(int columns) {
  if (columns == 128) return KernelOf<Type, kRowsOfB, false, 128>();
  if (columns == 192) return KernelOf<Type, kRowsOfB, false, 192>();
  if (columns == 224) return KernelOf<Type, kRowsOfB, false, 224>();
  return KernelOf<Type, kRowsOfB, false, 256>();
}

// With derivatives beside it of matrices only that are [n, k], as those of derivatives are.
template <class Type>
Kernel KernelFor(bool transposed, bool beside, int columns) {
  if (beside) return KernelOf<Type, false, true, kWgradColumns>();
  return transposed ? KernelFor<Type, false>(columns) : KernelFor<Type, true>(columns);
}
Kernel KernelFor(ElementType type, bool transposed, bool beside, int columns) {
  return type == ElementType::kBF16 ? KernelFor<BF16>(transposed, beside, columns)
                                    : KernelFor<F16>(transposed, beside, columns);
}

void Check(cudaError_t status) { ThrowIfError(status, "launching a collective matmul"); }

// An array of 16-bit items, its fastest dimension first, of which boxes are loaded or stored.
// `pitch` items lie between the rows that the first dimension is.
CUtensorMap Map(ElementType type, const void* at, std::vector<uint64_t> dims,
                std::vector<uint32_t> box, uint64_t pitch) {
  static const auto encode =
      reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(DriverFunction("cuTensorMapEncodeTiled"));
  const cuuint32_t rank = static_cast<cuuint32_t>(dims.size());
  std::vector<cuuint64_t> strides;  // of all but the fastest
  strides.push_back(kMatmulElementBytes * pitch);
  for (size_t d = 1; d + 1 < dims.size(); ++d) strides.push_back(strides.back() * dims[d]);
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

int Depth(const MatmulCall& call) {
  int items = 0;
  for (const int64_t k : call.ks) items += DivideUp(k, kTileDepth);
  return items;
}
int RowTiles(const MatmulCall& call) {
  return static_cast<int>(call.outer) * DivideUp(call.rows, kTileRows);
}
int ColumnTiles(const MatmulCall& call, const MatmulPlan& plan) {
  int tiles = 0;
  for (const int64_t n : call.ns) tiles += DivideUp(n, plan.tile_columns);
  return tiles;
}

// Of a sum, the columns of all rounds but the last one.
int64_t ColumnsOfRound(const MatmulCall& call, const MatmulPlan& plan) {
  return int64_t{DivideUp(ColumnTiles(call, plan), plan.rounds)} * plan.tile_columns;
}

// Items for which a ring has places: those of whole tiles.
size_t SentItems(Algorithm algorithm, const MatmulCall& call, int size, const MatmulPlan& plan) {
  const int64_t of_row_tile = algorithm == Algorithm::kAllGatherMatmul
                                  ? Depth(call)
                                  : ColumnsOfRound(call, plan) / kTileDepth;
  return static_cast<size_t>(size - 1) * RowTiles(call) * of_row_tile;
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
    cudaFuncAttributes attributes;
    Check(cudaFuncGetAttributes(&attributes, kernel.function));
    if (attributes.numRegs != kRegisters) {
      throw std::runtime_error("jax_intranode: the kernel of collective matmuls was compiled for " +
                               std::to_string(attributes.numRegs) +
                               " registers a thread; it takes " + std::to_string(kRegisters) +
                               ": compile it without a limit");
    }
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

// Of a product and its matrix, or of all that an operation has, so many columns from `first` on.
void LaunchRound(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                 const MatmulCall& call, int64_t first, int64_t columns, cudaStream_t stream) {
  const DeviceGroup& group = member.group;
  const bool sums = algorithm == Algorithm::kMatmulReduceScatter;
  Parameters p = {};
  p.group = group;
  std::copy(std::begin(member.ring), std::end(member.ring), p.ring);
  p.data_offset = RingDataOffset(member.ring_bytes);
  p.scratch = static_cast<char*>(call.scratch);
  p.products = static_cast<int>(call.products.size());
  p.derivatives = static_cast<int>(call.derivatives.size());
  p.sums = sums;
  p.rows_of_x = static_cast<const char*>(call.x());
  p.gathered = static_cast<char*>(call.gathered);
  p.rows = static_cast<int>(call.rows);
  p.row_bytes = static_cast<int>(call.k() * kMatmulElementBytes);
  p.depth = Depth(call);
  p.tiles_of_array = DivideUp(call.rows, kTileRows);
  p.tiles = RowTiles(call);
  p.pairs = DivideUp(p.tiles, kClusterSize);

  const uint64_t rows = call.rows, outer = call.outer;
  const auto after = [](auto* array, int64_t items) {
    return const_cast<char*>(static_cast<const char*>(array)) + items * kMatmulElementBytes;
  };
  const auto columns_of = [&](size_t product) -> uint64_t {
    return product == 0 ? columns : call.ns[product];
  };
  int depth = 0;
  for (size_t i = 0; i < call.ws.size(); ++i) {
    const size_t x = sums ? i : 0, product = sums ? 0 : i;
    const uint64_t k = call.ks[x], all = call.ns[product], n = columns_of(product);
    const int64_t before = product == 0 ? first : 0;
    MatrixOfCall& of = p.of[i];
    of.x = Map(call.type, call.xs[x], {k, rows, outer * (sums ? group.size : 1)},
               {kTileDepth, kHalfRows, 1}, k);
    of.w = call.transposed
               ? Map(call.type, after(call.ws[i], before * k), {k, n},
                     {kTileDepth, static_cast<uint32_t>(plan.tile_columns / 2)}, k)
               : Map(call.type, after(call.ws[i], before), {n, k}, {64, kTileDepth / 2}, all);
    of.product = Map(call.type, after(call.products[product], before),
                     {n, rows, outer * (sums ? 1 : group.size)}, {64, kHalfRows, 1}, all);
    of.first_tile = p.column_tiles;
    if (product == i) p.column_tiles += DivideUp(n, plan.tile_columns);
    depth = sums ? depth + DivideUp(k, kTileDepth) : p.depth;
    of.end = depth;
  }
  if (p.derivatives > 0) {
    const uint64_t n = columns_of(0);
    p.beside = Map(call.type, after(call.beside, first), {n, rows, outer * group.size},
                   {64, kHalfRows, 1}, call.ns[0]);
    p.beside_tiles = DivideUp(n, kTileRows);
    p.beside_pairs = DivideUp(p.beside_tiles, kClusterSize);
    p.pairs_before = std::min(plan.row_pairs_before_wgrad, (group.size - 1) * p.pairs);
    for (int i = 0; i < p.derivatives; ++i) {
      const uint64_t k = call.ks[i];
      DerivativeOfCall& of = p.derivative[i];
      of.w = Map(call.type, call.xs[i], {k, rows, outer * (sums ? group.size : 1)},
                 {64, kHalfRows / 2, 1}, k);
      of.product =
          Map(call.type, after(call.derivatives[i], first * k), {k, n, 1}, {64, kHalfRows, 1}, k);
      of.first_tile = p.beside_columns;
      p.beside_columns += DivideUp(k, plan.tile_columns);
    }
    p.beside_after = sums ? 0 : std::min(plan.wgrad_tiles_last, p.beside_pairs * p.beside_columns);
  }
  p.group_pairs = plan.band_pairs;
  CutGroups(&p);
  p.part = DivideUp(int64_t{p.pairs} * p.column_tiles, plan.parts);
  p.direct = plan.direct;
  p.pace = plan.direct && plan.tile_columns < 256 ? kPaceOfItem * p.depth : 0;
  const Kernel kernel = KernelFor(call.type, call.transposed, p.derivatives > 0, plan.tile_columns);
  void* arguments[] = {&p};
  Check(cudaLaunchKernel(kernel.function, dim3(BlocksOf(kernel)), dim3(kThreads), arguments,
                         kernel.shared_bytes, stream));
}

}  // namespace

size_t FusedScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                         const MatmulPlan& plan) {
  const bool sums = algorithm == Algorithm::kMatmulReduceScatter;
  return sums && !plan.direct ? FusedRingBytes(algorithm, call, size, plan) : 0;
}

size_t FusedRingBytes(Algorithm algorithm, const MatmulCall& call, int size,
                      const MatmulPlan& plan) {
  return SentItems(algorithm, call, size, plan) * kItem;
}

void LaunchFused(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                 const MatmulCall& call, cudaStream_t stream) {
  const bool sums = algorithm == Algorithm::kMatmulReduceScatter;
  const int64_t n = call.ns[0], of_round = sums ? ColumnsOfRound(call, plan) : n;
  for (int64_t first = 0; first < n; first += of_round) {
    LaunchRound(member, algorithm, plan, call, first, std::min(of_round, n - first), stream);
  }
}

void LoadFusedKernels() {
  int device, generation;
  Check(cudaGetDevice(&device));
  Check(cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device));
  if (generation != 9) return;
  for (const ElementType type : {ElementType::kBF16, ElementType::kF16}) {
    for (const int columns : kTileColumns) {
      BlocksOf(KernelFor(type, false, false, columns));
      BlocksOf(KernelFor(type, true, false, columns));
    }
    BlocksOf(KernelFor(type, true, true, kWgradColumns));
  }
}

}  // namespace jax_intranode
