// Reduce-scatter: rank d's result is the sum of every rank's shard d. One hop.
//
//   Scatter  send shard d of the input to rank d: slot [me] of d
//   Reduce   await my shard from everybody and sum
//
// Safety: group.h; a shard has at least one pack, so every rank hears from every rank. Threads of
// the same index handle pack i of a shard in both phases and on all ranks. The result must not lie
// in the input: other threads may not have sent their parts of that shard yet.
//
// These are the first two phases of two_shot.h, but the sum is stored and not sent. NCCL's
// symmetric RSxLL is similar.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "segments.h"
#include "types.h"

namespace jax_intranode {

template <class Type, int N, class PacketsOfType = typename Type::Packets>
struct ReduceScatter {
  using Packets = PacketsOfType;

  template <class Thread, class G, class C>
  JIN_FN static bool Scatter(Thread& t, const G& g, const C& shard, uint32_t epoch) {
    const size_t packs = shard.Packs(), slot_bytes = packs * Packets::kBytes;
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      // All are loaded before the first is stored: the compiler moves no load across a store.
      Pack p[Ranks<N>::kSlots];
      JIN_UNROLL
      for (int step = 1; step < Ranks<N>::kSlots; ++step) {
        if (Ranks<N>::Has(step, g.size)) {
          p[step] = shard.InputOf(Ranks<N>::After(g.rank, step, g.size)).Load(i);
        }
      }
      t.Admit();
      JIN_UNROLL
      for (int step = 1; step < Ranks<N>::kSlots; ++step) {
        if (Ranks<N>::Has(step, g.size)) {
          const int to = Ranks<N>::After(g.rank, step, g.size);
          Packets::Put(g.EpochBuffer(to, epoch) + SlotOf(g.rank, to) * slot_bytes, i,
                       Type::Sendable(p[step]));
        }
      }
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Reduce(Thread& t, const G& g, const C& shard, uint32_t epoch) {
    const size_t packs = shard.Packs(), slot_bytes = packs * Packets::kBytes;
    char* slots = g.EpochBuffer(g.rank, epoch);
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      const Pack own = Type::Sendable(shard.InputOf(g.rank).Load(i));
      Pack all[Ranks<N>::kSlots];
      JIN_UNROLL
      for (int r = 0; r < Ranks<N>::kSlots; ++r) all[r] = own;
      if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all)) return false;
      shard.Store(i, SumInRankOrder<Type, N>(all, g.size));
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  static constexpr int kPhases = 2;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& shard, uint32_t epoch) {
    return phase == 0 ? Scatter(t, g, shard, epoch) : Reduce(t, g, shard, epoch);
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Run(Thread& t, const G& g, const C& shard) {
    return RunOperation<ReduceScatter>(t, g, shard);
  }
};

}  // namespace jax_intranode
