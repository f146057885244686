// The sum of every rank's product of few rows: how products reach the ranks and are summed.
//
// Two kernels make one operation. The first one multiplies, and sends each pack of this rank's
// rounded product to every rank as soon as it has it, to its own, too. It waits for nobody, so
// ranks may share a GPU. The second one has few blocks, which await and sum. It may start as soon
// as all blocks of the first one run: then its launch takes no time, and its blocks can't take the
// place of any that send.
//
//   Send   (first kernel)   store pack i of the product in slot [me] of every rank's epoch buffer
//   Take   (second kernel)  await pack i in the slots of all ranks, store the sum, arm the slots
//
// The protocol is that of OneShot (one_hop.h), whose argument (group.h) holds with three changes:
//
//   A rank has a slot of its own. It is written by its first kernel and read and armed by its
//   second one, as any other slot.
//   The epoch is read by both kernels and advanced by the second one only, when the first one has
//   ended. Both begin after the previous operation's second kernel has ended, and the first kernel
//   of the next operation begins after this one's second kernel. So operations still follow each
//   other in stream order, which is what the argument asks for; how the packets of one operation
//   are divided among kernels and blocks is not.
//   A block of the second kernel waits for packets that any blocks of the ranks' first kernels
//   send. All of those send before anybody waits on that rank, and wait for nothing. The checks
//   that all ranks run the same operation meet as ever: the second kernels' first blocks.
//
// The first kernel marks the operation as begun, in the busy words of all blocks of the second one,
// which clear them.
#pragma once

#include "group.h"
#include "types.h"

namespace jax_intranode {

// The group, seen from no rank: a slot for each.
template <class G>
struct AllSlots {
  const G& group;
  int size = group.size;
  int rank = group.size;  // SlotOf: slot r is that of rank r
};

template <class Type, int N, class PacketsOfType = typename Type::Packets>
struct FewRows {
  using Packets = PacketsOfType;
  static constexpr int kAtOnce = N == 2 ? 4 : 1;  // packs that a thread awaits together

  // `slot_bytes`: of the whole product.
  template <class G>
  JIN_FN static void Send(const G& g, uint32_t epoch, size_t slot_bytes, size_t i, const Pack& p) {
    const Pack sent = Type::Sendable(p);
    JIN_UNROLL
    for (int step = 0; step < Ranks<N>::kSlots; ++step) {
      if (Ranks<N>::Has(step, g.size)) {
        const int to = Ranks<N>::After(g.rank, step, g.size);
        Packets::Put(g.EpochBuffer(to, epoch) + g.rank * slot_bytes, i, sent);
      }
    }
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Take(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const AllSlots<G> all_slots{g};
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    char* slots = g.EpochBuffer(g.rank, epoch);
    for (size_t first = t.First(); first < packs; first += kAtOnce * t.Stride()) {
      Pack all[kAtOnce][Ranks<N>::kSlots];
      bool arrived[kAtOnce];
      JIN_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {  // so that the loads of all packs are in flight at once
        const size_t i = first + k * t.Stride();
        arrived[k] = i < packs;
        JIN_UNROLL
        for (int r = 0; r < Ranks<N>::kSlots; ++r) {
          if (i < packs && Ranks<N>::Has(r, g.size)) {
            arrived[k] &= Packets::TryGet(slots + r * slot_bytes, i, &all[k][r]);
          }
        }
      }
      JIN_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const size_t i = first + k * t.Stride();
        if (i >= packs) break;
        if (!arrived[k] && !AwaitAll<Packets, N>(t, all_slots, slots, slot_bytes, i, all[k], i)) {
          return false;
        }
        c.Store(i, SumInRankOrder<Type, N>(all[k], g.size));
        ArmAll<Packets, N>(all_slots, slots, slot_bytes, i);
      }
    }
    return true;
  }
};

}  // namespace jax_intranode
