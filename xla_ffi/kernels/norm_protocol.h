// A psum, or a reduce-scatter, that adds a residual to its result and normalizes the rows of that.
//
// This is a collective of one_hop.h, or two_shot.h, with a row in the place of a pack: a block
// works on whole rows, each thread on some packs of a row. Each row begins with a pack of its own.
// The three differ in what is sent where, so one kernel has them all.
//
//                   Send                               Finish
//   one-shot        my rows to everybody               await a row from everybody, sum, finish
//   reduce-scatter  the rows of shard d to rank d      the same, for the rows of my shard
//   two-shot        the same                           the same, and send each sum to everybody;
//                                                      then await everybody's sums, finish
//
// norm.h finishes a row. Sums travel, and not what a norm makes of them: each rank has the
// residual, and norms all rows. A rank's epoch buffer has a slot for the rows of each other rank;
// in two-shot as many slots for sums follow. In two-shot the rows are divided into n shards of
// equal size; rows of zeros fill up the last ones.
//
// Safety: group.h. Within one operation each packet has its own address. There is at least one row,
// and a shard has one, so every rank sends at least one packet to every rank. Block b works on the
// same rows of a slot in both phases and on all ranks, so a block waits only for blocks of the same
// number: it awaits others' sums after it has sent all of its own. A thread clears its packets of
// a row when all of them have arrived, so Finish can be resumed at a row. Results may not overlap
// operands: a row of x is read in both phases.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "group.h"
#include "norm.h"

namespace jax_intranode {

// `Thread` is the context of group.h with what norm.h asks for, and
//   FirstUnit()   the unit of Finish at which to begin: 0, or where it gave up
template <class Type, int N, bool kAligned, class PacketsOfType = typename Type::Packets>
struct Norm {
  using Packets = PacketsOfType;
  using Rows = NormRows<Type, kAligned>;

  // The rows of a slot.
  JIN_FN static size_t SlotRows(const NormCall& c, int size) {
    return c.protocol == NormProtocol::kTwoShot ? (c.rows + size - 1) / size : c.rows;
  }

  // Pack k of row i of what goes to rank d.
  JIN_FN static Pack Part(const NormCall& c, int d, size_t slot_rows, size_t i, uint32_t k) {
    if (c.protocol == NormProtocol::kTwoShot) return Rows::X(c, 0, d * slot_rows + i, k);
    return Rows::X(c, c.protocol == NormProtocol::kReduceScatter ? d : 0, i, k);
  }

  template <class Thread, class G>
  JIN_FN static bool Send(Thread& t, const G& g, const NormCall& c, uint32_t epoch) {
    const uint32_t packs = Rows::Packs(c);
    const size_t rows = SlotRows(c, g.size);
    const size_t slot_bytes = rows * packs * Packets::kBytes;
    uint32_t first = t.Thread();  // of the first row
    if constexpr (N == 2) {
      const size_t i = t.Block();
      SendFirst<Type, Packets>(t, g, epoch, i < rows && first < packs, i * packs + first,
                               [&, k = first] { return Part(c, 1 - g.rank, rows, i, k); });
      first += t.Threads();
    }
    for (size_t i = t.Block(); i < rows; i += t.Blocks(), first = t.Thread()) {
      for (uint32_t k = first; k < packs; k += t.Threads()) {
        if (c.protocol == NormProtocol::kOneShot) {
          const Pack p = Type::Sendable(Part(c, 0, rows, i, k));
          t.Admit();
          PutToAll<Packets, N>(g, epoch, 0, slot_bytes, i * packs + k, p);
        } else {
          SendParts<Type, Packets, N>(t, g, epoch, slot_bytes, i * packs + k,
                                      [&](int r) { return Part(c, r, rows, i, k); });
        }
      }
    }
    return true;
  }

  template <class Thread, class G>
  JIN_FN static bool Finish(Thread& t, const G& g, const NormCall& c, uint32_t epoch) {
    constexpr uint32_t kMost = Rows::template kRowPacks<Thread>;
    const uint32_t packs = Rows::Packs(c);
    const size_t rows = SlotRows(c, g.size);
    const size_t slot_bytes = rows * packs * Packets::kBytes;
    const bool two_shot = c.protocol == NormProtocol::kTwoShot;
    char* const slots = g.EpochBuffer(g.rank, epoch);
    char* const sums = slots + (g.size - 1) * slot_bytes;
    // This block's rows of my slot; then, in two-shot, the same rows of the next rank's, and so on.
    const size_t block = t.Block(), mine = (rows + t.Blocks() - 1 - block) / t.Blocks();
    for (size_t u = t.FirstUnit(); u < mine * (two_shot ? g.size : 1); ++u) {
      const int step = static_cast<int>(u / mine);
      const int owner = Ranks<N>::After(g.rank, step, g.size);
      const size_t i = block + u % mine * t.Blocks(), row = two_shot ? owner * rows + i : i;
      Pack h[kMost], residual[kMost];
      JIN_UNROLL
      for (uint32_t j = 0; j < kMost; ++j) {
        const uint32_t k = t.Thread() + j * t.Threads();
        if (k >= packs) break;
        if (row < c.rows) residual[j] = Rows::Residual(c, row, k);
        if (step == 0) h[j] = Type::Sendable(Part(c, g.rank, rows, i, k));
      }
      JIN_UNROLL
      for (uint32_t j = 0; j < kMost; ++j) {
        const uint32_t k = t.Thread() + j * t.Threads();
        if (k >= packs) break;
        if (step > 0) {
          while (
              !Packets::TryGet(sums + SlotOf(owner, g.rank) * slot_bytes, i * packs + k, &h[j])) {
            if (!t.Wait(u, owner)) return false;
          }
        } else {
          const size_t at = i * packs + k;
          if (!AwaitSum<Type, Packets, N>(t, g, slots, slot_bytes, at, &h[j], u)) return false;
          // Used as it is sent: a NaN has the same bits everywhere.
          if (two_shot) h[j] = Type::Sendable(h[j]);
        }
      }
      for (uint32_t k = t.Thread(); k < packs; k += t.Threads()) {
        const size_t at = i * packs + k;
        if (step > 0) {
          Packets::Arm(sums + SlotOf(owner, g.rank) * slot_bytes, at);
        } else {
          ArmAll<Packets, N>(g, slots, slot_bytes, at);
        }
      }
      if (two_shot && step == 0) {
        JIN_UNROLL
        for (uint32_t j = 0; j < kMost; ++j) {
          const uint32_t k = t.Thread() + j * t.Threads();
          if (k >= packs) break;
          PutToAll<Packets, N>(g, epoch, (g.size - 1) * slot_bytes, slot_bytes, i * packs + k,
                               h[j]);
        }
      }
      if (row < c.rows) Rows::Finish(t, c, row, h, residual);
    }
    return true;
  }

  static constexpr int kPhases = 2;
  template <class Thread, class G>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const NormCall& c, uint32_t epoch) {
    return phase == 0 ? Send(t, g, c, epoch) : Finish(t, g, c, epoch);
  }

  template <class Thread, class G>
  JIN_FN static bool Run(Thread& t, const G& g, const NormCall& c) {
    const uint32_t epoch = Begin(t, g);
    Rows::PrefetchParameters(t, c);
    JIN_UNROLL
    for (int phase = 0; phase < kPhases; ++phase) {
      if (!RunPhase(phase, t, g, c, epoch)) return false;
    }
    End(t, g, epoch);
    return true;
  }
};

}  // namespace jax_intranode
