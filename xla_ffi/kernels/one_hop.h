// The collectives of one hop: each rank sends a pack to every other rank, and awaits a pack of
// each. What is sent, and what becomes of what arrives, makes four of them:
//
//                         summed           stored, in rank order
//   the same to all       OneShot          AllGather
//   a part to each rank   ReduceScatter    AllToAll
//
//   Send   send the input to every rank, or shard d of it to rank d: slot [me] of its epoch buffer;
//          store what is this rank's own in the result, if it is not summed
//   Take   await a pack of every other rank; store their sum with the own one, or each of them
// A rank's epoch buffer has a slot for each other rank.
//
// OneShot is the all-reduce of the least latency. It moves (n - 1) times the message over each
// link.
//
// Safety: group.h; an input, or a shard of it, has at least one pack, so every rank hears from
// every rank. Threads of the same index handle pack i in both phases and on all ranks (equal
// grids), so a block waits only for blocks of the same number.
//
// In place. OneShot: the result may be the input. AllGather: the input may be the rank's own shard
// of the result. AllToAll: the result may be the input, because a thread stores pack i of the
// shards after it has loaded and sent pack i of each. ReduceScatter: the result must not lie in the
// input, because other threads may not have sent their parts of that shard yet.
//
// OneShot follows the push variants of NCCL's symmetric AGxLL and TensorRT-LLM's one-shot Lamport
// kernel. NCCL's symmetric RSxLL is similar to ReduceScatter.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "segments.h"
#include "types.h"

namespace jax_intranode {

template <class Type, int N, bool kParts, bool kSums, class PacketsOfType>
struct OneHop {
  using Packets = PacketsOfType;

  template <class Thread, class G, class C>
  JIN_FN static bool Send(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    size_t i = t.First();
    if constexpr (N == 2 && !kIsSegment<C>) {
      const bool any = i < packs;
      Pack own = {};
      if constexpr (kParts && !kSums) {
        if (any) own = c.InputOf(g.rank).Load(i);
      }
      const Pack sent = SendFirst<Type, Packets>(t, g, epoch, any, i, [&] {
        if constexpr (kParts) {
          return c.InputOf(1 - g.rank).Load(i);
        } else {
          return c.Load(i);
        }
      });
      if constexpr (!kSums) {
        if (any) c.OutputOf(g.rank).Store(i, kParts ? SendableOf<Type>(t, own) : sent);
      }
      i += t.Stride();
    }
    for (; i < packs; i += t.Stride()) {
      Pack own;  // stored as it is sent: a NaN has the same bits everywhere
      if constexpr (kParts) {
        if constexpr (!kSums) own = SendableOf<Type>(t, c.InputOf(g.rank).Load(i));
        SendParts<Type, Packets, N>(t, g, epoch, slot_bytes, i,
                                    [&c, i](int r) { return c.InputOf(r).Load(i); });
      } else {
        own = SendableOf<Type>(t, c.Load(i));
        t.Admit();
        PutToAll<Packets, N>(g, epoch, 0, slot_bytes, i, own);
      }
      if constexpr (!kSums) c.OutputOf(g.rank).Store(i, own);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Take(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    char* slots = g.EpochBuffer(g.rank, epoch);
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      if constexpr (kSums) {
        Pack sum;
        if constexpr (kParts) {
          sum = SendableOf<Type>(t, c.InputOf(g.rank).Load(i));
        } else {
          sum = SendableOf<Type>(t, c.Load(i));
        }
        if (!AwaitSum<Type, Packets, N>(t, g, slots, slot_bytes, i, &sum, i)) return false;
        c.Store(i, sum);
      } else {
        Pack all[Ranks<N>::kSlots];
        if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all, i)) return false;
        JIN_UNROLL
        for (int r = 0; r < Ranks<N>::kSlots; ++r) {
          if (Ranks<N>::Has(r, g.size) && r != g.rank) c.OutputOf(r).Store(i, all[r]);
        }
      }
      ArmAll<Packets, N>(g, slots, slot_bytes, i);
    }
    return true;
  }

  static constexpr int kPhases = 2;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& c, uint32_t epoch) {
    return phase == 0 ? Send(t, g, c, epoch) : Take(t, g, c, epoch);
  }
};

template <class Type, int N, class Packets = typename Type::Packets>
struct OneShot : OneHop<Type, N, false, true, Packets> {};
template <class Type, int N, class Packets = typename Type::Packets>
struct AllGather : OneHop<Type, N, false, false, Packets> {};
template <class Type, int N, class Packets = typename Type::Packets>
struct ReduceScatter : OneHop<Type, N, true, true, Packets> {};
template <class Type, int N, class Packets = typename Type::Packets>
struct AllToAll : OneHop<Type, N, true, false, Packets> {};

}  // namespace jax_intranode
