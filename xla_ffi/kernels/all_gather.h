// All-gather: every rank's input, one after another in rank order, on every rank. One hop.
//
//   Push   send the input to every rank, into slot [me]; store it in the own result
//   Drain  await every other rank's input and store it
//
// Safety: group.h; an input has at least one pack, so every rank hears from every rank. Threads
// of the same index handle pack i in both phases and on all ranks. The input may be the rank's own
// shard of the result.
//
// It combines the push of one_shot.h with the drain of two_shot.h.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "segments.h"
#include "types.h"

namespace jax_intranode {

template <class Type, int N, class PacketsOfType = typename Type::Packets>
struct AllGather {
  using Packets = PacketsOfType;

  template <class Thread, class G, class C>
  JIN_FN static bool Push(Thread& t, const G& g, const C& shard, uint32_t epoch) {
    const size_t packs = shard.Packs(), slot_bytes = packs * Packets::kBytes;
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      // Stored as it is sent: a NaN has the same bits everywhere.
      const Pack p = Type::Sendable(shard.Load(i));
      t.Admit();
      PutToAll<Packets, N>(g, epoch, 0, slot_bytes, i, p);
      shard.OutputOf(g.rank).Store(i, p);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Drain(Thread& t, const G& g, const C& shard, uint32_t epoch) {
    const size_t packs = shard.Packs(), slot_bytes = packs * Packets::kBytes;
    char* slots = g.EpochBuffer(g.rank, epoch);
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      Pack all[Ranks<N>::kSlots];
      if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all)) return false;
      JIN_UNROLL
      for (int r = 0; r < Ranks<N>::kSlots; ++r) {
        if (Ranks<N>::Has(r, g.size) && r != g.rank) shard.OutputOf(r).Store(i, all[r]);
      }
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  static constexpr int kPhases = 2;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& shard, uint32_t epoch) {
    return phase == 0 ? Push(t, g, shard, epoch) : Drain(t, g, shard, epoch);
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Run(Thread& t, const G& g, const C& shard) {
    return RunOperation<AllGather>(t, g, shard);
  }
};

}  // namespace jax_intranode
