// Two-shot all-reduce: a reduce-scatter, then an all-gather, without a barrier between or after.
// Two hops; moves 2 (n - 1) / n times the message over each link.
//
// The message is cut into n shards of equal size, the last of them filled up with zeros (a shard
// has at least one pack, so every rank hears from every rank however small the message is).
//   Scatter  send shard d of the input to its owner, rank d: scatter slot [me] of d
//   Reduce   await my shard from everybody, sum it, send the sum to everybody: gather slot [me]
//   Drain    await everybody's sums
// A rank's half holds n scatter slots, then n gather slots.
//
// Safety: group.h. Within one operation each packet has a place of its own. Pack i of a shard is
// handled by the same thread index in all three phases and on all ranks, so a block waits only for
// its namesakes, and `in` may be `out`: a thread overwrites what only it reads, after reading it.
//
// After MSCCL++'s packet all-reduce and SGLang's two-shot push.
#pragma once

#include "group.h"
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
    const size_t shard = ShardPacks(c.Packs(), g.size);
    constexpr int kInFlight = N == 2 ? 4 : N == 4 ? 2 : 1;
    size_t i = t.First();
    for (; i + (kInFlight - 1) * t.Stride() < shard; i += kInFlight * t.Stride()) {
      Send<kInFlight>(t, g, c, epoch, i, shard);
    }
    for (; i < shard; i += t.Stride()) Send<1>(t, g, c, epoch, i, shard);
    return true;
  }

  // Sends packs i, i + stride, ... (kPacks of them) of every other rank's shard. All are loaded
  // before the first is stored: they come from HBM, and no load is moved across a store.
  template <int kPacks, class Thread, class G, class C>
  JIN_FN static void Send(Thread& t, const G& g, const C& c, uint32_t epoch, size_t i,
                          size_t shard) {
    Pack p[Ranks<N>::kSlots][kPacks];
    JIN_UNROLL
    for (int step = 1; step < Ranks<N>::kSlots; ++step) {
      JIN_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        if (Ranks<N>::Has(step, g.size)) {
          const int to = Ranks<N>::After(g.rank, step, g.size);
          p[step][k] = c.Load(to * shard + i + k * t.Stride());
        }
      }
    }
    t.Admit();
    JIN_UNROLL
    for (int step = 1; step < Ranks<N>::kSlots; ++step) {
      JIN_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        if (Ranks<N>::Has(step, g.size)) {
          char* slot = g.Half(Ranks<N>::After(g.rank, step, g.size), epoch) +
                       g.rank * shard * Packets::kBytes;
          Packets::Put(slot, i + k * t.Stride(), Type::Sendable(p[step][k]));
        }
      }
    }
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Reduce(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t shard = ShardPacks(c.Packs(), g.size), slot_bytes = shard * Packets::kBytes;
    char* slots = g.Half(g.rank, epoch);
    const size_t gather = g.size * slot_bytes;
    for (size_t i = t.First(); i < shard; i += t.Stride()) {
      const Pack own = Type::Sendable(c.Load(g.rank * shard + i));
      Pack all[Ranks<N>::kSlots];
      JIN_UNROLL
      for (int r = 0; r < Ranks<N>::kSlots; ++r) all[r] = own;
      if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all)) return false;
      // What is kept here is what is sent: a NaN has the same bits everywhere.
      const Pack sum = Type::Sendable(SumInRankOrder<Type, N>(all, g.size));
      JIN_UNROLL
      for (int step = 1; step < Ranks<N>::kSlots; ++step) {
        if (Ranks<N>::Has(step, g.size)) {
          const int to = Ranks<N>::After(g.rank, step, g.size);
          Packets::Put(g.Half(to, epoch) + gather + g.rank * slot_bytes, i, sum);
        }
      }
      c.Store(g.rank * shard + i, sum);
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Drain(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t shard = ShardPacks(c.Packs(), g.size), slot_bytes = shard * Packets::kBytes;
    char* slots = g.Half(g.rank, epoch) + g.size * slot_bytes;
    for (size_t i = t.First(); i < shard; i += t.Stride()) {
      Pack all[Ranks<N>::kSlots];
      if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all)) return false;
      JIN_UNROLL
      for (int r = 0; r < Ranks<N>::kSlots; ++r) {
        if (Ranks<N>::Has(r, g.size) && r != g.rank) c.Store(r * shard + i, all[r]);
      }
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Run(Thread& t, const G& g, const C& c) {
    const uint32_t epoch = Begin(t, g);
    if (!Scatter(t, g, c, epoch) || !Reduce(t, g, c, epoch) || !Drain(t, g, c, epoch)) return false;
    End(t, g, epoch);
    return true;
  }
};

}  // namespace jax_intranode
