// The math warpgroups of a block multiply tiles, add the products of peers, and store the results.
// See fused_matmul.h.
#pragma once

#include <type_traits>

#include "../kernels/types.h"
#include "fused_layout.cuh"
#include "fused_send.cuh"

namespace jax_intranode {
namespace {

// Clocks of this SM, modulo 2^32.
JIN_FN uint32_t Clock() { return static_cast<uint32_t>(clock()); }

// Makes the compiler compute a value once, not at each use.
JIN_FN uint32_t InRegister(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Reduce-scatter: waits until a tile of products has arrived from all peers. All threads of a warp
// call it; each lane looks at one flag at a time.
template <int kColumns>
JIN_FN void AwaitProducts(const Block<kColumns>& b, int row_tile, int column) {
  DeviceThread thread = b.Thread();
  constexpr int kChunks = TileConfig<kColumns>::kChunks;
  const FusedParams& p = b.p;
  const int lane = threadIdx.x & 31;
  JIN_UNROLL
  for (int first = 0; first < (kMaxRanks - 1) * kChunks; first += 32) {
    const int step = (first + lane) / kChunks;
    const int slot = SlotOfTile<kColumns>(p, step, row_tile, column) + (first + lane) % kChunks;
    for (;;) {
      const uint32_t missing = ~__ballot_sync(~0u, step >= p.size - 1 || b.HasArrived(slot));
      if (missing == 0) break;
      b.Wait(thread, Sender(p, (first + __ffs(missing) - 1) / kChunks));
    }
  }
  __syncwarp();
}

// Adds up half chunks of a tile of the rank's own rows: the products of peers and of this rank, in
// rank order, in float32, rounded once. Each thread sums its own words. Packs of a peer are loaded
// well before they are added. Even peers and odd peers have registers of their own: moving a pack
// that is still in flight would mean waiting for it.
template <class Type, int kColumns, int kHalfChunks>
class ProductSum {
 public:
  JIN_FN ProductSum(const FusedParams& p, int row_tile, int column, int first_half)
      : p_(p),
        row_tile_(row_tile),
        column_(column),
        offset_(first_half * kHalfChunk + threadIdx.x % 128 * 16) {
    Load(&even_);
    Load(&odd_);
  }

  // Replaces this rank's words of the next half chunk by the sums.
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
      if (peer == p_.rank) add_own();
      JIN_UNROLL
      for (int i = 0; i < kWords; ++i) add(i, ahead->packs[i / 4].word[i % 4]);
      Load(ahead);
    };
#pragma unroll 1
    for (int peer = 0; peer < Peers(); peer += 2) {
      add_peer(peer, &even_);
      if (peer + 1 < Peers()) add_peer(peer + 1, &odd_);
    }
    if (p_.rank == Peers()) add_own();
    JIN_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = Type::RoundPair(sum[2 * i], sum[2 * i + 1]);
  }

 private:
  // Packs in flight of every other peer, and the peer and the half chunk that are loaded next.
  // Peers are numbered in rank order, without this rank.
  struct Ahead {
    int peer, half = 0;
    Pack packs[kPacks];
  };

  JIN_FN int Peers() const { return p_.size - 1; }

  // Loads the next packs, if there are any.
  JIN_FN void Load(Ahead* ahead) {
    if (ahead->peer >= Peers()) {
      ahead->peer %= 2;
      ++ahead->half;
    }
    if (ahead->half >= kHalfChunks || ahead->peer >= Peers()) return;
    const int rank = ahead->peer + (ahead->peer >= p_.rank ? 1 : 0);
    const int slot = SlotOfTile<kColumns>(p_, StepOfSender(p_, rank), row_tile_, column_);
    const char* const from =
        SlotData(p_, p_.rank, slot) + offset_ + ahead->half * TileConfig<kColumns>::kNextHalf;
    JIN_UNROLL
    for (int i = 0; i < kPacks; ++i) ahead->packs[i] = LoadPack(from + i * kPacksBytes);
    ahead->peer += 2;
  }

  const FusedParams& p_;
  const int row_tile_, column_, offset_;
  Ahead even_{0}, odd_{1};
};

// A math warpgroup. It alternates tiles with the other one, and stores its products while the other
// one multiplies. Or, if tiles are wide, it computes half of the rows of each tile.
template <class Type, Layout kLayout, bool kWgrad, int kColumns>
class Multiplier {
 public:
  JIN_FN Multiplier(const Block<kColumns>& b, uint32_t operations)
      : b_(b),
        p_(b.p),
        operations_(operations),
        warpgroup_(threadIdx.x / 128 - 1),
        thread_(threadIdx.x % 128),
        first_half_(Config::kAlternate ? 0 : warpgroup_),
        first_left_(InRegister(TileDescriptor(b.Left(0) + first_half_ * kHalfChunk))),
        first_right_(InRegister(TileDescriptor(b.Right(0)))),
        first_empty_(InRegister(ClusterAddress(b.Empty(0), thread_ % kClusterSize))) {}

  JIN_FN void Run() {
    ClusterTileLoop<Block<kColumns>> tiles(b_);
    const auto stages = [&] {
      return kWgrad && IsWgrad(p_, tiles.number()) ? WgradStages(p_) : p_.k_chunks;
    };
    uint32_t fed = 0;  // stages before those of the tile
    for (int turn = 0; tiles.Next(); turn ^= 1, fed += stages()) {
      if (Config::kAlternate && turn != warpgroup_) continue;
      const ClusterTile tile = ClusterTileOf(p_, tiles.number());  // early: it takes a while
      float d[kHalves][kColumns / 2];
      Multiply(tiles, tile, fed, d);
      const int row_tile = kClusterSize * tile.row_pair + RankInCluster();
      const bool real = row_tile < (kWgrad && tile.wgrad ? p_.wgrad_row_tiles : p_.row_tiles);
      uint32_t words[kHalfChunks][kWords];
      Round(d, words);
      if (Config::kWholeChunks && tiles.is_sent()) {
        if (real) StoreForPeer(tile, row_tile, words);
        Sync();
        if (thread_ == 0) StoreSharedRelease(b_.Stored(warpgroup_), ++stored_);
      } else if (real) {
        StoreResult(tile, row_tile, words);
      }
    }
    if (thread_ == 0) StoreWait<0>();
  }

 private:
  using Config = TileConfig<kColumns>;
  static constexpr int kHalves = Config::kHalves;
  // Half chunks of a tile's products that the warpgroup holds: one or two of the first chunk, then
  // those of the next one.
  static constexpr int kHalfChunks = kHalves * Config::kChunks;
  using Words = uint32_t[kHalfChunks][kWords];

  // Multiplies a tile when it is this warpgroup's turn, and lets the other one have the next turn.
  JIN_FN void Multiply(const ClusterTileLoop<Block<kColumns>>& tiles, const ClusterTile& tile,
                       uint32_t fed, float (&d)[kHalves][kColumns / 2]) {
    JIN_UNROLL
    for (auto& half : d) {
      JIN_UNROLL
      for (float& value : half) value = 0;
    }
    // Wait until the other warpgroup has seen the last stage of its tile. A parity only
    // distinguishes a barrier's phase from the next one, so a warp must not wait for a later phase.
    if (Config::kAlternate && fed > 0) {
      warpgroup_ == 0 ? NamedSync<3, 256>() : NamedSync<4, 256>();
    }
    const int first_stage = fed % Config::kStages;
    const uint32_t parity = fed / Config::kStages & 1;
    const int last_stage =
        kWgrad && tile.wgrad ? MultiplyStages<true, true>(first_stage, parity, WgradStages(p_), d)
        : IsNMajor<kLayout>(p_) ? MultiplyStages<false, true>(first_stage, parity, p_.k_chunks, d)
                                : MultiplyStages<false, false>(first_stage, parity, p_.k_chunks, d);
    if (Config::kAlternate && ClusterTileLoop<Block<kColumns>>(tiles).Next()) {
      warpgroup_ == 0 ? NamedArrive<4, 256>() : NamedArrive<3, 256>();
    }
    MatmulWait<0>();
    JIN_UNROLL
    for (auto& half : d) MatmulDone(half);
    Release(last_stage);
  }

  // Issues the matrix instructions of `count` stages. Releases all stages but the last one, which
  // it returns.
  template <bool kMMajorLeft, bool kNMajorRight>
  JIN_FN int MultiplyStages(int stage, uint32_t parity, int count,
                            float (&d)[kHalves][kColumns / 2]) {
    int multiplied = 0;
    for (int k = 0; k < count; ++k) {
      BarrierWait(b_.Full(stage), parity);
      const uint32_t left = first_left_ + stage * DescriptorOffset(Config::kStageBytes);
      const uint32_t right = first_right_ + stage * DescriptorOffset(Config::kStageBytes);
      MatmulFence();
      JIN_UNROLL
      for (int i = 0; i < kTileDepth / 16; ++i) {
        JIN_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          Matmul16<std::is_same_v<Type, BF16>, kMMajorLeft, kNMajorRight>(
              d[half], left + half * DescriptorOffset(kHalfChunk) + (kMMajorLeft ? 128 : 2) * i,
              right + (kNMajorRight ? 128 : 2) * i);
        }
      }
      MatmulCommit();
      if (k > 0) {
        MatmulWait<1>();
        Release(multiplied);
      }
      multiplied = stage;
      if (++stage == Config::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    return multiplied;
  }

  JIN_FN void Round(const float (&d)[kHalves][kColumns / 2], Words& words) const {
    JIN_UNROLL
    for (int i = 0; i < kHalfChunks; ++i) {
      JIN_UNROLL
      for (int k = 0; k < kWords; ++k) {
        const float* const pair = &d[i % kHalves][Config::FirstColumn(i / kHalves) / 2 + 2 * k];
        words[i][k] = Type::RoundPair(pair[0], pair[1]);
      }
    }
  }

  // Stores products for a peer: in scratch, from where a sender warp copies them, or directly in
  // the peer's ring.
  JIN_FN void StoreForPeer(const ClusterTile& tile, int row_tile, const Words& words) {
    const int slot = SlotOfTile<kColumns>(p_, tile.step, row_tile, tile.column);
    char* to = p_.scratch + slot * int64_t{kChunk};
    if (p_.direct) {
      const int peer = Receiver(p_, tile.step);
      if (!(granted_ >> tile.step & 1)) {
        granted_ |= 1u << tile.step;
        if (thread_ == 0) AwaitGrant(b_, peer, operations_);
        Sync();
      }
      to = SlotData(p_, peer, slot);
    }
    to += first_half_ * kHalfChunk + thread_ * sizeof(Pack);
    const uint32_t began = Clock();
    JIN_UNROLL
    for (int i = 0; i < kHalfChunks; ++i) {
      JIN_UNROLL
      for (int k = 0; k < kWords; k += 4) {
        while (p_.pace_clocks > 0 && Clock() - began < (i * kPacks + k / 4) * p_.pace_clocks) {
        }
        *reinterpret_cast<Pack*>(to + i * Config::kNextHalf + k / 4 * kPacksBytes) =
            Pack{{words[i][k], words[i][k + 1], words[i][k + 2], words[i][k + 3]}};
      }
    }
  }

  // Stores a tile of a product or of a weight gradient. A reduce-scatter adds the peers' products
  // first. Half chunks go through shared memory, from where bulk copies take them.
  JIN_FN void StoreResult(const ClusterTile& tile, int row_tile, Words& words) {
    const CUtensorMap* product;
    int column;
    const auto goes_to = [&](const auto& entry) {
      product = &entry.product;
      column = (tile.column - entry.first_tile) * kColumns;
    };
    RowTile rows = {0, row_tile * kTileRows};
    if (kWgrad && tile.wgrad) {
      goes_to(WgradOf(p_, tile.column));
    } else {
      goes_to(MatrixOf(p_, tile.column));
      rows = RowTileOf(p_, row_tile);
      if (!p_.reduce_scatter) rows.array = rows.array * p_.size + Owner(p_, tile.step);
    }
    // A warp stores four 8 x 8 matrices at once, 16 rows of 16 columns: the offset, in a half
    // chunk, of the row whose address this thread gives.
    const int lane = threadIdx.x % 32;
    const uint32_t offset = SwizzledOffset(thread_ / 32 * 16 + lane % 16, lane / 16);
    const auto store = [&](int i) {
      const uint32_t buffer = b_.Buffer(warpgroup_) + i % Config::kBuffers * kHalfChunk;
      if (thread_ == 0) StoreWaitRead<Config::kBuffers - 1>();  // the buffer is free
      Sync();
      JIN_UNROLL
      for (int k = 0; k < kWords; k += 4) {
        StoreMatrices(buffer + (offset ^ k * 8),
                      {words[i][k], words[i][k + 1], words[i][k + 2], words[i][k + 3]});
      }
      SharedProxyFence();
      Sync();
      if (thread_ == 0) {
        Store(*product, column + Config::FirstColumn(i / kHalves),
              rows.row + (first_half_ + i % kHalves) * kHalfRows, rows.array, buffer);
        StoreCommit();
      }
    };
    static_assert(kHalfChunks % Config::kBuffers == 0);
    if (!Config::kWholeChunks || !p_.reduce_scatter || (kWgrad && tile.wgrad)) {
      JIN_UNROLL
      for (int i = 0; i < kHalfChunks; ++i) store(i);
      return;
    }
    if (thread_ < 32) AwaitProducts(b_, row_tile, tile.column);
    Sync();
    ProductSum<Type, kColumns, kHalfChunks> sum(p_, row_tile, tile.column, first_half_);
    JIN_UNROLL
    for (int i = 0; i < kHalfChunks; ++i) {
      sum.Add(words[i]);
      store(i);
    }
  }

  // Releases a stage to the producer warps of the cluster: one thread for each block.
  JIN_FN void Release(int stage) const {
    if (thread_ < kClusterSize) BarrierArrive(first_empty_ + 8 * stage);
  }
  JIN_FN void Sync() const { warpgroup_ == 0 ? NamedSync<1, 128>() : NamedSync<2, 128>(); }

  const Block<kColumns>& b_;
  const FusedParams& p_;
  const uint32_t operations_;
  const int warpgroup_, thread_, first_half_;
  const uint32_t first_left_, first_right_, first_empty_;  // of the first stage
  uint32_t stored_ = 0;   // tiles for peers that this warpgroup has stored
  uint32_t granted_ = 0;  // bits: steps whose receivers have granted their rings
};

}  // namespace
}  // namespace jax_intranode
