// All-to-all: rank r's shard d becomes rank d's shard r. One hop.
//
//   Push   send shard d of the input to rank d: slot [me] of d; store the own shard in the result
//   Drain  await a shard from every other rank and store it, as an all-gather does
//
// Safety: group.h; a shard has at least one pack, so every rank hears from every rank. Threads of
// the same index handle pack i of a shard in both phases and on all ranks. The result may be the
// input itself: a thread stores pack i of the shards after it has loaded and sent pack i of each.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "all_gather.h"
#include "segments.h"
#include "types.h"

namespace jax_intranode {

template <class Type, int N, class PacketsOfType = typename Type::Packets>
struct AllToAll {
  using Packets = PacketsOfType;

  template <class Thread, class G, class C>
  JIN_FN static bool Push(Thread& t, const G& g, const C& shard, uint32_t epoch) {
    const size_t packs = shard.Packs(), slot_bytes = packs * Packets::kBytes;
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      // All are loaded before the first is stored: the compiler moves no load across a store.
      Pack p[Ranks<N>::kSlots];
      JIN_UNROLL
      for (int step = 0; step < Ranks<N>::kSlots; ++step) {
        if (Ranks<N>::Has(step, g.size)) {
          p[step] = Type::Sendable(shard.InputOf(Ranks<N>::After(g.rank, step, g.size)).Load(i));
        }
      }
      t.Admit();
      JIN_UNROLL
      for (int step = 1; step < Ranks<N>::kSlots; ++step) {
        if (Ranks<N>::Has(step, g.size)) {
          const int to = Ranks<N>::After(g.rank, step, g.size);
          Packets::Put(g.EpochBuffer(to, epoch) + SlotOf(g.rank, to) * slot_bytes, i, p[step]);
        }
      }
      shard.OutputOf(g.rank).Store(i, p[0]);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Drain(Thread& t, const G& g, const C& shard, uint32_t epoch) {
    return AllGather<Type, N, Packets>::Drain(t, g, shard, epoch);
  }

  static constexpr int kPhases = 2;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& shard, uint32_t epoch) {
    return phase == 0 ? Push(t, g, shard, epoch) : Drain(t, g, shard, epoch);
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Run(Thread& t, const G& g, const C& shard) {
    return RunOperation<AllToAll>(t, g, shard);
  }
};

}  // namespace jax_intranode
