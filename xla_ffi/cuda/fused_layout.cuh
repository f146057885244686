// What the warps of the fused kernel share: its shared memory and registers, the ring buffers. See
// fused_matmul.h.
#pragma once

// A kernel that calls functions can't change the number of registers of its warps.
#define JAX_INTRANODE_GIVE_UP_FN __device__ __forceinline__

#include "device_thread.h"
#include "fused_params.h"
#include "hopper.h"
#include "signals.h"

namespace jax_intranode {
namespace {

using namespace hopper;

constexpr uint32_t kHalfChunk = kChunk / 2;

// Products travel in the layout in which matrix instructions leave them in registers. Each thread
// of a warpgroup holds kWords words of a half chunk and stores them as packs of four. The first
// packs of all threads lie next to each other, then the second packs, and so on.
constexpr int kWords = 16;
constexpr int kPacks = kWords / 4;
constexpr int kPacksBytes = 128 * sizeof(Pack);  // of a warpgroup
static_assert(kPacks * kPacksBytes == kHalfChunk);

// A lane of a warp, or a bit of a word, stands for each rank or step.
static_assert(kMaxRanks <= 32);

constexpr int kSenderWarps = 2;

// How the elements of w lie: w is [n, k], or [k, n], or the kernel takes both. It does so where
// that costs no registers, because each kernel costs build time.
enum class Layout { kKMajor, kNMajor, kEither };

// How tiles of kColumns columns are divided between the warpgroups, and where shared memory holds
// what. From an address that is a multiple of 1024: pipeline stages, each a chunk of the left
// operand and then kColumns columns of the right one; for each math warpgroup buffers of one half
// chunk of products; barriers; counters; the work lists that the cluster has claimed.
template <int kColumns>
struct TileConfig {
  // Whether the math warpgroups alternate tiles, so that one multiplies while the other one stores.
  // The products of wider tiles only fit the registers of both: then each computes half of the
  // rows.
  static constexpr bool kAlternate = kColumns <= kMaxAlternatingColumns;
  static constexpr int kHalves = kAlternate ? 2 : 1;  // half chunks of rows per warpgroup
  static constexpr uint32_t kNextHalf =
      kAlternate ? kHalfChunk : kChunk;  // between its half chunks

  // Registers of a thread of a math warpgroup, most of which hold products, and of other threads.
  static constexpr int kMathRegisters = kColumns == 192 ? 224 : 200;
  static constexpr int kOtherRegisters = 3 * kRegisters - 2 * kMathRegisters;

  static constexpr int kChunks = ChunksOfTile(kColumns);
  // Whether a tile is a whole number of chunks, as products that travel have to be.
  static constexpr bool kWholeChunks = kColumns % kTileDepth == 0;
  // The first column of a chunk of products. If the last chunk overlaps the one before it, the
  // common columns are stored twice, with the same bits.
  JIN_FN static constexpr int FirstColumn(int chunk) {
    return Min(chunk * kTileDepth, kColumns - kTileDepth);
  }

  static constexpr uint32_t kRightBytes = kChunks * kChunk / 2;
  static constexpr uint32_t kStageBytes = kChunk + kRightBytes;
  static constexpr int kStages = kColumns == 128 ? 6 : kColumns == 192 ? 5 : 4;
  static constexpr int kBuffers = kColumns == 192 ? 1 : 2;  // of a warpgroup

  static constexpr uint32_t kBufferOffset = kStages * kStageBytes;
  static constexpr uint32_t kBarrierOffset = kBufferOffset + 2 * kBuffers * kHalfChunk;
  static constexpr uint32_t kStoredOffset = kBarrierOffset + 8 * 2 * kStages;
  static constexpr uint32_t kListOffset = kStoredOffset + 8;
  // A cluster claims at most one list of tiles that are not sent and as many others as there are
  // clusters.
  static constexpr uint32_t kBytes = kListOffset + 4 * (kMaxClusters + 1) + 1024;
  static_assert(kBytes <= 227 << 10);
};

template <Layout kLayout>
JIN_FN bool IsNMajor(const FusedParams& p) {
  return kLayout == Layout::kEither ? p.n_major : kLayout == Layout::kNMajor;
}

// The entry of a product or weight gradient that a column tile belongs to. (The terms of a
// reduce-scatter have one product.)
template <class Entry>
JIN_FN const Entry& EntryOfColumn(const Entry* entry, int count, int column) {
  while (--count > 0 && column >= entry[1].first_tile) ++entry;
  return *entry;
}
JIN_FN const MatrixParams& MatrixOf(const FusedParams& p, int column) {
  return EntryOfColumn(p.matrix, p.products, column);
}
JIN_FN const WgradParams& WgradOf(const FusedParams& p, int column) {
  return EntryOfColumn(p.wgrad, p.wgrads, column);
}

// The offset of 16 bytes of a row in a swizzled half chunk; `column` counts 16 bytes.
JIN_FN int SwizzledOffset(int row, int column) { return row * 128 + ((column ^ row) & 7) * 16; }

// This rank's state in the group, and rings.
JIN_FN RegionHeader* OwnHeader(const FusedParams& p) {
  return reinterpret_cast<RegionHeader*>(p.group.region[p.rank]);
}
JIN_FN char* SlotData(const FusedParams& p, int rank, int slot) {
  return p.ring[rank] + p.data_offset + static_cast<int64_t>(slot) * kChunk;
}
JIN_FN uint32_t* SlotFlag(const FusedParams& p, int rank, int slot) {
  return reinterpret_cast<uint32_t*>(p.ring[rank] + kRingHeaderBytes) + slot;
}
JIN_FN RingHeader* OwnRing(const FusedParams& p) {
  return reinterpret_cast<RingHeader*>(p.ring[p.rank]);
}

// Accesses to memory that peers, or other blocks of the cluster, access at the same time.

// Bypasses the L1 cache, which may hold values from before a peer wrote.
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

// What the warps of a block share.
template <int kColumns>
struct Block {
  using Config = TileConfig<kColumns>;
  const FusedParams& p;
  uint32_t base;       // of shared memory
  uint32_t operation;  // number of this operation on this rank's ring

  // Pipeline stages: their operands, and the barriers that the producer warp and the math
  // warpgroups wait for in turn.
  JIN_FN uint32_t Left(int stage) const { return base + stage * Config::kStageBytes; }
  JIN_FN uint32_t Right(int stage) const { return Left(stage) + kChunk; }
  JIN_FN uint32_t Full(int stage) const { return base + Config::kBarrierOffset + 8 * stage; }
  JIN_FN uint32_t Empty(int stage) const { return Full(Config::kStages + stage); }

  // The first buffer of a math warpgroup.
  JIN_FN uint32_t Buffer(int warpgroup) const {
    return base + Config::kBufferOffset + warpgroup * Config::kBuffers * kHalfChunk;
  }

  // The number of tiles for peers whose products a math warpgroup has stored.
  JIN_FN uint32_t Stored(int warpgroup) const {
    return base + Config::kStoredOffset + 4 * warpgroup;
  }
  // Whether all products of the block's k-th tile for peers have been stored.
  JIN_FN bool IsStored(uint32_t k) const {
    const auto has = [&](int warpgroup, uint32_t tiles) {
      return LoadSharedAcquire(Stored(warpgroup)) >= tiles;
    };
    return Config::kAlternate ? has(k % 2, k / 2 + 1) : has(0, k + 1) && has(1, k + 1);
  }

  // Where the k-th work list of the cluster is announced: its number plus 1, or 0 until then.
  JIN_FN uint32_t ListAt(int k) const { return base + Config::kListOffset + 4 * k; }
  // Waits for the k-th list.
  JIN_FN int List(int k) const {
    uint32_t announced;
    while ((announced = LoadSharedRelaxed(ListAt(k))) == 0) {
    }
    return static_cast<int>(announced) - 1;
  }
  JIN_FN int Clusters() const { return gridDim.x / kClusterSize; }

  // Whether the chunk of a slot has arrived.
  JIN_FN bool HasArrived(int slot) const {
    return LoadAcquire(SlotFlag(p, p.rank, slot)) == operation;
  }

  // To be called each time that something of rank `missing` has not arrived.
  JIN_FN void Wait(DeviceThread& thread, int missing) const {
    thread.WaitAnd(missing, [&] { CompareOperations(thread, p.group); });
  }
  JIN_FN DeviceThread Thread() const {
    return DeviceThread(
        p.group, p.reduce_scatter ? Algorithm::kMatmulReduceScatter : Algorithm::kAllGatherMatmul);
  }
};

// Claims a work list for the cluster. Called by one thread of its first block.
JIN_FN uint32_t ClaimList(const FusedParams& p) { return atomicAdd(&OwnRing(p)->busy, 1); }

// Announces the cluster's k-th list to its blocks. If more lists are claimed than the operation
// has, two operations use the ring at the same time, and the thread gives up.
template <int kColumns>
JIN_FN void AnnounceList(const Block<kColumns>& b, int k, uint32_t claimed) {
  b.Thread().Admit(claimed >= SentLists(b.p, b.Clusters()) + b.Clusters(), 0);
  for (int rank = 0; rank < kClusterSize; ++rank) StoreToCluster(b.ListAt(k), rank, claimed + 1);
}

}  // namespace
}  // namespace jax_intranode
