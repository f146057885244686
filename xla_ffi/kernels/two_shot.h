// Two-shot all-reduce: a reduce-scatter, then an all-gather, without a barrier between or after.
// It takes two hops and moves 2 (n - 1) / n times the message over each link.
//
// The message is divided into n shards of equal size; zeros fill up the last one (a shard
// has at least one pack, so every rank hears from every rank however small the message is).
//   Scatter  send shard d of the input to its owner, rank d: scatter slot [me] of d
//   Reduce   await my shard from everybody, sum it, send the sum to everybody: gather slot [me]
//   Drain    await everybody's sums
// A rank's epoch buffer holds a scatter slot for each other rank, then a gather slot for each.
//
// Safety: group.h. Within one operation each packet has its own address. Threads of the same index
// handle pack i of a shard in all three phases and on all ranks. So a block waits only for blocks
// of the same number, and `in` may be `out`: a thread overwrites only packs that it alone reads,
// after it has read them.
//
// It follows MSCCL++'s packet all-reduce and SGLang's two-shot push.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "segments.h"
#include "types.h"

namespace jax_intranode {

template <class Type, int N, class PacketsOfType = typename Type::Packets>
struct TwoShot {
  using Packets = PacketsOfType;

  JIN_FN static size_t ShardPacks(size_t packs, int size) {
    const size_t n = N > 0 ? N : size;
    return packs > n ? (packs + n - 1) / n : 1;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Scatter(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t shard = ShardPacks(c.Packs(), g.size), slot_bytes = shard * Packets::kBytes;
    if (shard < kBurstPacks) {
      for (size_t i = t.First(); i < shard; i += t.Stride()) {
        SendParts<Type, Packets, N>(t, g, epoch, slot_bytes, i,
                                    [&c, shard, i](int r) { return c.Load(r * shard + i); });
      }
      return true;
    }
    constexpr int kInFlight = N == 2 ? 4 : N == 4 ? 2 : 1;
    size_t i = t.First();
    if constexpr (kInFlight > 1) {
      for (; i + (kInFlight - 1) * t.Stride() < shard; i += kInFlight * t.Stride()) {
        SendInTurn<kInFlight>(t, g, c, epoch, i, shard);
      }
    }
    for (; i < shard; i += t.Stride()) SendInTurn<1>(t, g, c, epoch, i, shard);
    return true;
  }

  // Shards of at least this size, 128 KB, are sent to one rank after another. On 4 H200s a message
  // of 1 MB takes 7.4 us this way, and 8.2 us if it is sent to all ranks at once, because senders
  // share the links of a receiver for a while; 64 KB take 4.3 and 4.2 us. On the CPU it makes no
  // difference, and tests reach both.
#if defined(__CUDACC__)
  static constexpr size_t kBurstPacks = 8192;
#else
  static constexpr size_t kBurstPacks = 8;
#endif

  // Sends kPacks packs (i, i + stride, ...) of every other rank's shard, one rank after another.
  template <int kPacks, class Thread, class G, class C>
  JIN_FN static void SendInTurn(Thread& t, const G& g, const C& c, uint32_t epoch, size_t i,
                                size_t shard) {
    JIN_UNROLL
    for (int step = 1; step < Ranks<N>::kSlots; ++step) {
      if (Ranks<N>::Has(step, g.size)) {
        const int to = Ranks<N>::After(g.rank, step, g.size);
        Pack p[kPacks];
        JIN_UNROLL
        for (int k = 0; k < kPacks; ++k) p[k] = c.Load(to * shard + i + k * t.Stride());
        t.Admit();
        JIN_UNROLL
        for (int k = 0; k < kPacks; ++k) {
          Packets::Put(g.EpochBuffer(to, epoch) + SlotOf(g.rank, to) * shard * Packets::kBytes,
                       i + k * t.Stride(), SendableOf<Type>(t, p[k]));
        }
      }
    }
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Reduce(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t shard = ShardPacks(c.Packs(), g.size), slot_bytes = shard * Packets::kBytes;
    char* slots = g.EpochBuffer(g.rank, epoch);
    const size_t gather = (g.size - 1) * slot_bytes;
    for (size_t i = t.First(); i < shard; i += t.Stride()) {
      Pack sum = SendableOf<Type>(t, c.Load(g.rank * shard + i));
      if (!AwaitSum<Type, Packets, N>(t, g, slots, slot_bytes, i, &sum, i)) return false;
      sum = SendableOf<Type>(t, sum);  // stored as it is sent: a NaN has the same bits everywhere
      PutToAll<Packets, N>(g, epoch, gather, slot_bytes, i, sum);
      c.Store(g.rank * shard + i, sum);
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Drain(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t shard = ShardPacks(c.Packs(), g.size), slot_bytes = shard * Packets::kBytes;
    char* slots = g.EpochBuffer(g.rank, epoch) + (g.size - 1) * slot_bytes;
    for (size_t i = t.First(); i < shard; i += t.Stride()) {
      Pack all[Ranks<N>::kSlots];
      if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all, i)) return false;
      JIN_UNROLL
      for (int r = 0; r < Ranks<N>::kSlots; ++r) {
        if (Ranks<N>::Has(r, g.size) && r != g.rank) c.Store(r * shard + i, all[r]);
      }
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  static constexpr int kPhases = 3;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& c, uint32_t epoch) {
    return phase == 0   ? Scatter(t, g, c, epoch)
           : phase == 1 ? Reduce(t, g, c, epoch)
                        : Drain(t, g, c, epoch);
  }
};

}  // namespace jax_intranode
