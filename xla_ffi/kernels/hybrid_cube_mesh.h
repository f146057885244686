// All-reduce on a hybrid cube mesh, along its links only.
//
// Half of the ranks are one quad and the other half the other. Within a quad every rank is linked
// to every other one, its mates. Each rank is also linked to one rank of the other quad, its relay,
// whose relay it is. (A machine has 8 ranks. The code takes 2 and 4, too, for the models.)
//
//   Push      send the input to each mate: quad slot [place of me] of its epoch buffer
//   Exchange  await the mates' inputs, sum the quad in rank order, send the sum to the relay
//   Finish    await the relay's sum; add the sum of the quad with rank 0, then that of the other
//             one; round once
// A rank's epoch buffer holds a slot for each rank of its quad, then one for the relay's sum. Sums
// travel as they are accumulated: those of 16-bit types as float32, in two packets a pack. So all
// ranks add the same two sums in the same order, and have the same bits. The order differs from
// that of other algorithms, and so may the last bits.
//
// Safety: group.h, with "every rank that it is linked to" for "every other one". Every operation
// sends at least one packet along each link, in both directions: inputs between mates, a sum
// between relays. So no other kind of operation may run on such a group. The argument for ranks r
// and p takes only what they send each other, so ranks without a link need none: they never write
// to each other. What the mates sent is read twice, by Exchange and by Finish, and armed by Finish.
// Threads of the same index handle pack i in all phases and on all ranks. So a block waits only for
// blocks of the same number, and `in` may be `out`: a thread overwrites only packs that it alone
// reads, after it has read them for the last time.
//
// The check of same_operation.h reaches only the ranks that a rank is linked to. Those find another
// operation; the others may end theirs with what passed on the way, before the failure is told.
//
// It follows the algorithm of PyTorch's first IntraNodeComm, whose sum differed between ranks.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include <type_traits>

#include "segments.h"
#include "types.h"

namespace jax_intranode {

// What a rank is linked to.
struct Links {
  uint32_t peers = 0;  // bit r: rank r
  int relay = -1;

  JIN_HOST_FN bool Has(int r) const { return (peers >> r & 1) != 0; }
};

// The buffers of a call (buffers.h), which travel along a rank's links.
template <class C>
struct Linked : C {
  Links links;
};
using LinkedBuffers = Linked<Buffers>;

// The group without the regions of ranks that this one has no link to. Host only.
template <class G>
G WithoutUnlinked(G group, const Links& links) {
  for (int r = 0; r < group.size; ++r) {
    if (r != group.rank && !links.Has(r)) group.region[r] = nullptr;
  }
  return group;
}

// The type whose packs hold what another one accumulates.
template <class Type>
struct SumsAs {
  using Wide = Type;
};
template <>
struct SumsAs<BF16> {
  using Wide = F32;
};
template <>
struct SumsAs<F16> {
  using Wide = F32;
};

template <class Type, int N, class PacketsOfType = typename Type::Packets>
struct HybridCubeMesh {
  using Packets = PacketsOfType;
  using Wide = typename SumsAs<Type>::Wide;
  // Packs of a sum of one pack.
  static constexpr int kWide = sizeof(typename Type::Sum) / sizeof(Pack);
  static constexpr int kMostMates = (N > 0 ? N : kMaxRanks) / 2;
  static_assert(std::is_same_v<typename Type::Packets, typename Wide::Packets>);
  static_assert(kWide == (Type::kItemBytes == 2 ? 2 : 1));  // as in EpochBufferBytesNeeded

  // The ranks of this rank's quad, in order.
  struct Quad {
    int member[kMostMates];
    int count = 0;
    int place = 0;  // of this rank
    bool first;     // whether rank 0 is in it

    template <class G>
    JIN_FN Quad(const G& g, const Links& links) : first(g.rank == 0 || IsMate(links, 0)) {
      JIN_UNROLL
      for (int r = 0; r < Ranks<N>::kSlots; ++r) {
        if (!Ranks<N>::Has(r, g.size) || !(r == g.rank || IsMate(links, r))) continue;
        if (r == g.rank) place = count;
        JIN_UNROLL
        for (int q = 0; q < kMostMates; ++q) {
          if (q == count) member[q] = r;
        }
        ++count;
      }
    }
    JIN_FN static bool IsMate(const Links& links, int r) {
      return links.Has(r) && r != links.relay;
    }
    JIN_FN bool HasMate(int q) const { return q < count && q != place; }
  };

  template <class Thread, class G, class C>
  JIN_FN static bool Push(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const Quad quad(g, c.links);
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      const Pack p = Type::Sendable(c.Load(i));
      t.Admit();
      JIN_UNROLL
      for (int q = 0; q < kMostMates; ++q) {
        if (quad.HasMate(q)) {
          Packets::Put(g.EpochBuffer(quad.member[q], epoch) + quad.place * slot_bytes, i, p);
        }
      }
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Exchange(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const Quad quad(g, c.links);
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    char* const slots = g.EpochBuffer(g.rank, epoch);
    char* const there = g.EpochBuffer(c.links.relay, epoch) + quad.count * slot_bytes;
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      Pack sum[kWide];
      if (!SumOfQuad(t, g, c, quad, slots, slot_bytes, i, sum)) return false;
      t.Admit();  // a quad of one rank has sent nothing before
      JIN_UNROLL
      for (int k = 0; k < kWide; ++k) Packets::Put(there, i * kWide + k, sum[k]);
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Finish(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const Quad quad(g, c.links);
    const size_t packs = c.Packs(), slot_bytes = packs * Packets::kBytes;
    char* const slots = g.EpochBuffer(g.rank, epoch);
    char* const from_relay = slots + quad.count * slot_bytes;
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      Pack own[kWide], other[kWide];
      // The inputs have arrived before: Exchange has read them.
      if (!SumOfQuad(t, g, c, quad, slots, slot_bytes, i, own)) return false;
      if (!AwaitRelay(t, c.links.relay, from_relay, i, other)) return false;
      Pack total[kWide];
      JIN_UNROLL
      for (int k = 0; k < kWide; ++k) {
        typename Wide::Sum sum;
        Wide::Start(&sum, quad.first ? own[k] : other[k]);
        Wide::Add(&sum, quad.first ? other[k] : own[k]);
        memcpy(&total[k], &sum, sizeof(Pack));
      }
      typename Type::Sum sum;
      memcpy(&sum, total, sizeof(sum));
      c.Store(i, Type::Round(sum));
      JIN_UNROLL
      for (int q = 0; q < kMostMates; ++q) {
        if (quad.HasMate(q)) Packets::Arm(slots + q * slot_bytes, i);
      }
      JIN_UNROLL
      for (int k = 0; k < kWide; ++k) Packets::Arm(from_relay, i * kWide + k);
    }
    return true;
  }

  static constexpr int kPhases = 3;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& c, uint32_t epoch) {
    return phase == 0   ? Push(t, g, c, epoch)
           : phase == 1 ? Exchange(t, g, c, epoch)
                        : Finish(t, g, c, epoch);
  }

 private:
  // The sum of pack i of the quad, in the form in which it is sent. False: a pack has not arrived.
  template <class Thread, class G, class C>
  JIN_FN static bool SumOfQuad(Thread& t, const G& g, const C& c, const Quad& quad, char* slots,
                               size_t slot_bytes, size_t i, Pack (&sum)[kWide]) {
    Pack all[kMostMates];
    const Pack own = Type::Sendable(c.Load(i));
    JIN_UNROLL
    for (int q = 0; q < kMostMates; ++q) all[q] = own;
    for (;;) {
      int missing = -1;
      JIN_UNROLL
      for (int q = 0; q < kMostMates; ++q) {
        if (quad.HasMate(q) && !Packets::TryGet(slots + q * slot_bytes, i, &all[q])) {
          missing = quad.member[q];
        }
      }
      if (missing < 0) break;
      if (!t.Wait(i, missing)) return false;
    }
    typename Type::Sum total;
    Type::Start(&total, all[0]);
    JIN_UNROLL
    for (int q = 1; q < kMostMates; ++q) {
      if (q < quad.count) Type::Add(&total, all[q]);
    }
    memcpy(sum, &total, sizeof(total));
    JIN_UNROLL
    for (int k = 0; k < kWide; ++k) sum[k] = Wide::Sendable(sum[k]);
    return true;
  }

  template <class Thread>
  JIN_FN static bool AwaitRelay(Thread& t, int relay, char* slot, size_t i, Pack (&sum)[kWide]) {
    for (;;) {
      bool arrived = true;
      JIN_UNROLL
      for (int k = 0; k < kWide; ++k) {
        arrived = Packets::TryGet(slot, i * kWide + k, &sum[k]) && arrived;
      }
      if (arrived) return true;
      if (!t.Wait(i, relay)) return false;
    }
  }
};

}  // namespace jax_intranode
