// One-shot all-reduce: every rank sends its whole input to every rank, and each sums all of them.
// It takes one hop, so it has the least latency. It moves (n - 1) times the message over each link.
//
// A rank's epoch buffer has a slot for each other rank, which holds that rank's input. Safety:
// group.h; every rank sends all its packs, at least one, to every rank. Threads of the same index
// send and receive a pack on all ranks (equal grids), so a block waits only for blocks of the same
// number.
//
// It follows the push variants of NCCL's symmetric AGxLL and TensorRT-LLM's one-shot Lamport
// kernel.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "segments.h"
#include "types.h"

namespace jax_intranode {

template <class Type, int N, class PacketsOfType = typename Type::Packets>
struct OneShot {
  using Packets = PacketsOfType;

  template <class Thread, class G, class C>
  JIN_FN static bool Push(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      const Pack p = Type::Sendable(c.Load(i));
      t.Admit();
      PutToAll<Packets, N>(g, epoch, 0, slot_bytes, i, p);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Reduce(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    char* slots = g.EpochBuffer(g.rank, epoch);
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      const Pack own = Type::Sendable(c.Load(i));
      Pack all[Ranks<N>::kSlots];
      JIN_UNROLL
      for (int r = 0; r < Ranks<N>::kSlots; ++r) all[r] = own;
      if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all)) return false;
      c.Store(i, SumInRankOrder<Type, N>(all, g.size));
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  static constexpr int kPhases = 2;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& c, uint32_t epoch) {
    return phase == 0 ? Push(t, g, c, epoch) : Reduce(t, g, c, epoch);
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Run(Thread& t, const G& g, const C& c) {
    return RunOperation<OneShot>(t, g, c);
  }
};

}  // namespace jax_intranode
