// How chunks travel to peers: the sender warps, and the warp that copies arriving chunks into the
// gathered operand.
//
// A chunk is written into a slot of the receiver's ring and stays there until the receiver has used
// it. (XLA's own buffers can't be used instead: they move when XLA captures a graph again on one
// rank only.) Each slot has a flag, a word of its own.
//
// Why no slot is written before its last content has been read
//   When its kernel begins, a rank grants its ring to each peer, in Signals::ring_grant. All
//   earlier users of the ring have ended by then. A sender writes only after it has seen the grant.
//   The grant carries the number of the operation in the group, which grows alike on all ranks, so
//   a sender does not take it for the grant of another operation. (Each sender warp, and each math
//   warpgroup that stores into rings, looks for a peer's grant while it still has something to send
//   to that peer.)
//   A rank's kernel ends when all chunks for this rank have arrived and have been used, and when
//   all chunks that it sends have been written. A peer overwrites its grant when it begins its next
//   operation. By then the peer has received everything that the old grant stood for, so no block
//   that still runs needs the old grant.
//
// Why a flag that is set means that the chunk of this operation has arrived
//   The grant also carries the number of the receiver's operation on its ring. All groups of a
//   device share the ring, and each operation has another number. The sender writes the chunk, then
//   a fence at system scope, then this number into the flag. One fence may serve two chunks.
//   Products that a math warpgroup has stored in the ring itself are published by a sender warp:
//   the warpgroup synchronises, one of its threads increments its count of stored tiles with
//   release semantics, the sender warp acquires the count. The fence that follows orders all that
//   this thread has observed, whoever wrote it. (Without the fence flags overtake data: on 2 H200s
//   sums were wrong, even with bulk copies that had completed.) A flag holds nothing but such
//   numbers, so what it held before is the number of an operation that has ended. Nobody clears
//   flags.
//
// Only runs on GPUs check these fences: the order of tiles alone has a test on CPUs
// (tests/native/fused_order_test.cc).
#pragma once

#include "fused_feed.cuh"
#include "fused_layout.cuh"

namespace jax_intranode {
namespace {

// How many loads of four rows a warp has in flight. With more, or with more sender warps, chunks
// leave faster than the links take them; they then fill the paths to memory, and operands of the
// math warpgroups arrive late. (Three sender warps with eight loads: up to 18 % longer.)
constexpr int kLoadsOfRows = 2;      // all-gather
constexpr int kLoadsOfProducts = 4;  // reduce-scatter
constexpr int kLoadsOfArrived = 8;   // the warp that copies arriving chunks

// Waits until a peer grants its ring. Returns the number of the operation there.
template <int kColumns>
JIN_FN uint32_t AwaitGrant(const Block<kColumns>& b, int peer, uint32_t operations) {
  DeviceThread thread = b.Thread();
  uint64_t* const word = &SignalsOf(b.p.group, b.p.rank)->ring_grant[peer];
  uint64_t grant;
  while (static_cast<uint32_t>(grant = LoadAcquire(word)) != operations + 1) {
    b.Wait(thread, peer);
  }
  return static_cast<uint32_t>(grant >> 32);
}

// Copies a chunk. All threads of a warp call it; together they copy four rows at a time, 16 bytes a
// lane. `load(n)` reads the lane's bytes of the n-th four rows, `store(n, pack)` writes them.
// `kLoads` loads are in flight at a time; `meanwhile` is called while the first ones are.
template <int kLoads, class LoadRows, class StoreRows, class Meanwhile>
JIN_FN void CopyChunk(LoadRows&& load, StoreRows&& store, Meanwhile&& meanwhile) {
  JIN_UNROLL
  for (int first = 0; first < kTileRows / 4; first += kLoads) {
    Pack packs[kLoads];
    JIN_UNROLL
    for (int i = 0; i < kLoads; ++i) packs[i] = load(first + i);
    if (first == 0) meanwhile();
    JIN_UNROLL
    for (int i = 0; i < kLoads; ++i) store(first + i, packs[i]);
  }
}

// Sends the chunks of a warp. The fence before a flag takes a while, so a chunk's flag is set while
// the next chunk's loads are in flight, and one fence serves two chunks. The last chunks of an
// operation are urgent, because peers wait for nothing else: each gets its own fence.
template <int kLoads, int kColumns>
class ChunkSender {
 public:
  JIN_FN ChunkSender(const Block<kColumns>& b, uint32_t operations)
      : b_(b), operations_(operations) {}

  // Waits until the receiver of a step grants its ring.
  JIN_FN void AwaitRing(int step) {
    if (granted_ >> step & 1) return;
    Publish();  // peers must not wait for chunks while this warp waits
    granted_ |= 1u << step;
    const uint32_t number = AwaitGrant(b_, Receiver(b_.p, step), operations_);
    if (Lane() == step) number_of_step_ = number;
  }

  // Copies a chunk to its slot. `load` and `store` are those of CopyChunk; `store` also gets the
  // slot's address.
  template <class LoadRows, class StoreRows>
  JIN_FN void Send(int step, int slot, bool urgent, LoadRows&& load, StoreRows&& store) {
    const int peer = Receiver(b_.p, step);
    char* const to = SlotData(b_.p, peer, slot);
    CopyChunk<kLoads>(
        load, [&](int n, const Pack& pack) { store(to, n, pack); },
        [&] {
          if (unpublished_ == kPublishedAtOnce || urgent) Publish();
        });
    const uint32_t number = __shfl_sync(~0u, number_of_step_, step);
    if (Lane() == unpublished_) {
      flag_ = SlotFlag(b_.p, peer, slot);
      number_ = number;
    }
    ++unpublished_;
  }

  // Sets the flags of all chunks that have been copied.
  JIN_FN void Publish() {
    __syncwarp();
    if (Lane() < unpublished_) {
      Fence();
      Store(flag_, number_);
    }
    unpublished_ = 0;
  }

 private:
  static constexpr int kPublishedAtOnce = 2;

  JIN_FN int Lane() const { return threadIdx.x % 32; }

  const Block<kColumns>& b_;
  const uint32_t operations_;
  uint32_t granted_ = 0;         // bits: steps whose receivers have granted their rings
  uint32_t number_of_step_ = 0;  // lane s: the operation's number on the ring of step s
  int unpublished_ = 0;          // chunks that have been copied, but whose flags are not set
  uint32_t* flag_ = nullptr;     // lane i: the flag of the i-th of them
  uint32_t number_ = 0;          // and the value that it gets
};

// The part of a chunk that a lane copies, in x or in the gathered x: 16 bytes of every fourth row.
struct LaneRows {
  int64_t offset;  // of the first row, in bytes
  int rows_left;   // from there on; 0 if the columns are past the end of x
  int four_rows;   // bytes

  JIN_FN LaneRows(const FusedParams& p, const RowTile& rows, int64_t array, int k) {
    const int lane = threadIdx.x & 31;
    const int row = rows.row + lane / 8;
    const int byte = k * kTileDepth * 2 + lane % 8 * 16;
    offset = (array * p.rows + row) * p.row_bytes + byte;
    rows_left = byte < p.row_bytes ? p.rows - row : 0;
    four_rows = 4 * p.row_bytes;
  }
  JIN_FN bool Has(int n) const { return 4 * n < rows_left; }
  JIN_FN int64_t At(int n) const { return offset + static_cast<int64_t>(n) * four_rows; }
};

// The same part in a slot, where the chunk is swizzled.
struct LaneSlot {
  int first = SwizzledOffset((threadIdx.x & 31) / 8, threadIdx.x % 8);
  JIN_FN int At(int n) const { return (first ^ n % 2 * 64) + n * 512; }
};

// All-gather: sends chunks of the rank's shard to all peers, and copies them into the gathered x if
// `kGathers`. A warp claims one chunk after the other, so chunks leave in their order. Returns when
// all chunks have been claimed.
template <bool kGathers, int kColumns>
JIN_FN void SendShard(const Block<kColumns>& b, uint32_t operations) {
  const FusedParams& p = b.p;
  const int chunks = ChunksSent(p);
  const auto claim = [&] {
    return threadIdx.x % 32 == 0 ? atomicAdd(&OwnRing(p)->claimed_chunks, 1) : 0;
  };
  const LaneSlot in_slot;
  ChunkSender<kLoadsOfRows, kColumns> sender(b, operations);
  int next = claim();
  for (int i; (i = __shfl_sync(~0u, next, 0)) < chunks;) {
    next = claim();  // in flight while this chunk is copied
    const Chunk chunk = ChunkOf(p, i);
    if (chunk.row_tile >= p.row_tiles) continue;
    sender.AwaitRing(chunk.step);
    const RowTile rows = RowTileOf(p, chunk.row_tile);
    const LaneRows from(p, rows, rows.array, chunk.k);
    const LaneRows own(p, rows, static_cast<int64_t>(rows.array) * p.size + p.rank, chunk.k);
    const bool urgent = i + 2 * kSenderWarps * static_cast<int>(gridDim.x) >= chunks;
    sender.Send(
        chunk.step, SlotOfChunk(p, chunk.step, chunk.row_tile, chunk.k), urgent,
        [&](int n) { return from.Has(n) ? LoadPack(p.x + from.At(n)) : Pack{}; },
        [&](char* to, int n, const Pack& pack) {
          *reinterpret_cast<Pack*>(to + in_slot.At(n)) = pack;
          if (kGathers && chunk.step == 1 && own.Has(n)) {
            *reinterpret_cast<Pack*>(p.gathered + own.At(n)) = pack;
          }
        });
  }
  sender.Publish();
}

// All-gather: copies arriving chunks into the gathered x. One warp of each block calls it and
// copies the block's share of them.
template <int kColumns>
JIN_FN void CopyArriving(const Block<kColumns>& b) {
  const FusedParams& p = b.p;
  const int chunks = ChunksSent(p);
  const LaneSlot in_slot;
  for (int i = blockIdx.x; i < chunks; i += gridDim.x) {
    const Chunk chunk = ChunkOf(p, i);
    if (chunk.row_tile >= p.row_tiles) continue;
    const int owner = RankAfter(p, chunk.step);
    const RowTile rows = RowTileOf(p, chunk.row_tile);
    const int slot = SlotOfChunk(p, chunk.step, chunk.row_tile, chunk.k);
    AwaitChunks(b, slot, 0, 1, owner);
    const LaneRows to(p, rows, static_cast<int64_t>(rows.array) * p.size + owner, chunk.k);
    const char* const from = SlotData(p, p.rank, slot);
    CopyChunk<kLoadsOfArrived>([&](int n) { return LoadPack(from + in_slot.At(n)); },
                               [&](int n, const Pack& pack) {
                                 if (to.Has(n)) {
                                   *reinterpret_cast<Pack*>(p.gathered + to.At(n)) = pack;
                                 }
                               },
                               [] {});
  }
}

// Reduce-scatter: sends the block's products from scratch to their owners. The sender warps take
// turns at the chunks.
template <int kColumns>
JIN_FN void SendProducts(const Block<kColumns>& b, uint32_t operations, int sender_warp) {
  // Each warp sends something of each tile. A warp that sends nothing at a step could look for the
  // grant after the peer has overwritten it.
  static_assert(TileConfig<kColumns>::kChunks >= kSenderWarps);
  const FusedParams& p = b.p;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;  // number of the block's earlier tiles
  int chunks = 0;       // number of their chunks, modulo kSenderWarps
  ChunkSender<kLoadsOfProducts, kColumns> sender(b, operations);
  ClusterTileLoop<Block<kColumns>> tiles(b);
  while (tiles.Next() && tiles.is_sent()) {
    const ClusterTile tile = ClusterTileOf(p, tiles.number());
    const int row_tile = kClusterSize * tile.row_pair + RankInCluster();
    const uint32_t k = before++;
    if (row_tile >= p.row_tiles) continue;
    sender.AwaitRing(tile.step);
    const auto is_stored = [&] { return __all_sync(~0u, b.IsStored(k)); };  // the same in all lanes
    if (!is_stored()) {
      sender.Publish();  // peers must not wait for chunks while this warp waits
      while (!is_stored()) __nanosleep(100);
    }
    const bool urgent = tiles.number() + 2 * b.Clusters() >= ClusterTilesSent(p);
    for (int chunk = 0; chunk < TileConfig<kColumns>::kChunks; ++chunk) {
      const bool sends = chunks == sender_warp;
      if (++chunks == kSenderWarps) chunks = 0;
      if (!sends) continue;
      const int slot = SlotOfTile<kColumns>(p, tile.step, row_tile, tile.column) + chunk;
      const char* const from = p.scratch + static_cast<int64_t>(slot) * kChunk + lane * 16;
      sender.Send(
          tile.step, slot, urgent, [&](int n) { return LoadPack(from + n * 512); },
          [&](char* to, int n, const Pack& pack) {
            *reinterpret_cast<Pack*>(to + lane * 16 + n * 512) = pack;
          });
    }
  }
  sender.Publish();
}

// Reduce-scatter with `direct`: publishes the block's products, which the math warpgroups have
// stored in their owners' rings. The sender warps take turns at the tiles.
template <int kColumns>
JIN_FN void PublishProducts(const Block<kColumns>& b, uint32_t operations, int sender_warp) {
  constexpr int kChunks = TileConfig<kColumns>::kChunks;
  const FusedParams& p = b.p;
  const int lane = threadIdx.x % 32;
  ClusterTileLoop<Block<kColumns>> tiles(b);
  for (uint32_t k = 0; tiles.Next() && tiles.is_sent(); ++k) {
    const ClusterTile tile = ClusterTileOf(p, tiles.number());
    const int row_tile = kClusterSize * tile.row_pair + RankInCluster();
    if (static_cast<int>(k % kSenderWarps) != sender_warp || row_tile >= p.row_tiles) continue;
    while (!__all_sync(~0u, b.IsStored(k))) __nanosleep(100);  // the same in all lanes
    const int peer = Receiver(p, tile.step);
    // The ring has been granted. It is not granted to the next operation yet: no lane sets a flag
    // before all lanes have read the grant.
    const uint32_t number = AwaitGrant(b, peer, operations);
    __syncwarp();
    if (lane < kChunks) {
      Fence();
      Store(SlotFlag(p, peer, SlotOfTile<kColumns>(p, tile.step, row_tile, tile.column) + lane),
            number);
    }
    __syncwarp();
  }
}

}  // namespace
}  // namespace jax_intranode
