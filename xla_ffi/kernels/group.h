// A group of ranks, its memory, and what every operation on it does first and last.
//
// Each rank owns a region of its slab, which all ranks of the group can write:
//
//   header           the rank's own state: its epoch, its busy words, whether it is closed. Other
//                    ranks' kernels write what they run (same_operation.h), `begun`, and `taken`.
//                    Its second 32 KiB hold a log on the CPU (host/host_group.h) and words that
//                    peers set on GPUs (cuda/signals.h).
//   epoch buffer 0   packets of operations with an even epoch
//   epoch buffer 1   packets of operations with an odd epoch
//
// The argument that all algorithms share
//   Who writes an epoch buffer: any other rank of the group, with packets (packets.h). Who reads
//   it: its owner, and nobody else. Who clears it: its owner arms each packet as soon as it has
//   read it. Invariant: between two operations of the same parity, every word of that epoch buffer
//   is kEmpty.
//
//   Why operation e + 2 can't collide with operation e, which used the same epoch buffer of rank p:
//   rank r writes packets of e + 2 after its own operation e + 1 ended, so after it had received a
//   packet of e + 1 from p (every operation sends at least one packet from every rank to every
//   other one). p sent that packet after its operation e had ended, when it had read and armed all
//   that it received. The end of a kernel makes p's arming visible before the next kernel's
//   packets; nothing else needs an order. One epoch buffer would not do: r may be in e + 1 while p
//   still polls for packets of e.
//
//   An operation may take several epochs, for the segments of its message. Then fences take the
//   place of a kernel's end (segments.h). Everywhere else "operation" means one of one epoch.
//
//   The argument does not depend on size, type, algorithm or number of blocks, so these may change
//   from one operation to the next. It needs three things: ranks call the same operations in the
//   same order, one at a time on each rank (the busy words detect most overlaps), and operation e
//   ends before e + 1 begins (stream order; no programmatic dependent launch but that of
//   few_rows.h, inside of an operation).
//
//   A block waits only for the blocks of the same number on the other ranks, and so does the one
//   that checks the operation, which comes first (same_operation.h). So a grid need not fit on the
//   GPU all at once, as long as each GPU starts blocks in the order of their numbers (all do; CUDA
//   does not promise it): the first block that has not ended is then resident on every rank. If a
//   GPU did otherwise, the deadline would end the wait.
//
//   The epoch lives here, in device memory, and the kernel advances it: a call replayed from a
//   graph is no different from one that the host launched. Only its parity matters, so wrapping at
//   2^32 is harmless. Each block keeps its own copy. Block 0 also advances the copies of blocks
//   that this operation did not launch, because the next one may launch them.
//
// tests/native/model/collectives_model.cc checks this (CONTRIBUTING.md says in which behaviours).
#pragma once

#include "buffers.h"
#include "packets.h"
#include "types.h"

namespace jax_intranode {

constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 256;
// The threads of a block on GPUs. It limits the registers of the kernels. A row of a norm of
// kMaxHidden elements takes all of them.
constexpr int kMaxThreads = 512;
constexpr size_t kHeaderBytes = 64 << 10;

struct RegionHeader {
  uint32_t epoch[kMaxBlocks];
  uint32_t busy[kMaxBlocks];
  uint32_t closed;      // the host sets it once: what is replayed afterwards gives up
  uint32_t operations;  // of this group so far (same_operation.h)
  uint64_t peer_operation[2][kMaxRanks];
  uint32_t begun[kMaxRanks];  // the last permute that each rank has begun (permute.h)
  // The windows that each block of each rank has taken of what this rank sends (ragged.h).
  uint32_t taken[kMaxRanks][kMaxBlocks];
};
static_assert(sizeof(RegionHeader) <= kHeaderBytes / 2);

struct Group {
  char* region[kMaxRanks];  // each rank's region, as this rank addresses it; [rank] is its own
  size_t epoch_buffer_bytes;
  int rank;
  int size;

  JIN_FN RegionHeader* Header() const { return reinterpret_cast<RegionHeader*>(region[rank]); }
  JIN_FN char* EpochBuffer(int of_rank, uint32_t epoch) const {
    return region[of_rank] + kHeaderBytes + (epoch & 1) * epoch_buffer_bytes;
  }
  // Where rank `of` tells rank `to` which operation it runs.
  JIN_FN uint64_t* OperationOf(int of, int to, uint32_t count) const {
    return &reinterpret_cast<RegionHeader*>(region[to])->peer_operation[count & 1][of];
  }
};

// Whether a call is a segment of one (segments.h).
template <class C>
constexpr bool kIsSegment = false;

// The bodies are written over a call (buffers.h) and a thread context `Thread`:
//   First(), Stride()   the packs of a phase that this thread works on
//   Thread(), Threads(), Block(), Blocks(), Sync()   as in CUDA
//   Wait(i, missing)    called each time that pack i of rank `missing` has not arrived. False gives
//                       up: the phase returns false at once and may be resumed at pack i.
//   Enter(busy, closed) marks this block's operation as begun
//   type()              the element type, where the body is for more than one (types.h)
//   FenceSegment()      a fence (memory.h) between two segments of an operation (segments.h)
//   Admit()             gives up if another one was in flight then, or if the region was closed.
//                       Called before the first store to a peer, but after the input is loaded:
//                       the answer to Enter takes as long (SendFirst).

// Returns the epoch of the operation that begins.
template <class Thread, class G>
JIN_FN uint32_t Begin(Thread& t, const G& g) {
  RegionHeader* h = g.Header();
  t.Enter(&h->busy[t.Block()], &h->closed);
  return Load(&h->epoch[t.Block()]);
}

// `epoch` is the last one of the operation.
template <class Thread, class G>
JIN_FN void End(Thread& t, const G& g, uint32_t epoch) {
  RegionHeader* h = g.Header();
  t.Sync();  // every thread of the block has read the epoch and armed what it received
  if (t.Thread() == 0) {
    Store(&h->epoch[t.Block()], epoch + 1);
    Store(&h->busy[t.Block()], 0);
  }
  if (t.Block() == 0) {
    for (int b = t.Blocks() + t.Thread(); b < kMaxBlocks; b += t.Threads()) {
      Store(&h->epoch[b], epoch + 1);
    }
  }
}

// `N` is the group's size where it is known when compiling, else 0.
template <int N>
struct Ranks {
  static constexpr int kSlots = N > 0 ? N : kMaxRanks;
  JIN_FN static bool Has(int r, int size) { return N > 0 || r < size; }
  // The rank `step` after `rank`. Peers are visited in this rotated order, so that at any moment
  // each of them is written by one rank.
  JIN_FN static int After(int rank, int step, int size) {
    const int n = N > 0 ? N : size;
    const int r = rank + step;
    return r >= n ? r - n : r;
  }
};

// Where the slot of rank `of` lies among those of rank `at`, which has none for itself.
JIN_FN int SlotOf(int of, int at) { return of - (of > at ? 1 : 0); }

// Sends pack i to every other rank: into slot [me] of the slots at `offset` of its epoch buffer.
template <class Packets, int N, class G>
JIN_FN void PutToAll(const G& g, uint32_t epoch, size_t offset, size_t slot_bytes, size_t i,
                     const Pack& p) {
  JIN_UNROLL
  for (int step = 1; step < Ranks<N>::kSlots; ++step) {
    if (Ranks<N>::Has(step, g.size)) {
      const int to = Ranks<N>::After(g.rank, step, g.size);
      Packets::Put(g.EpochBuffer(to, epoch) + offset + SlotOf(g.rank, to) * slot_bytes, i, p);
    }
  }
}

// Sends pack i of another part of the message to each other rank: `part(r)` loads that of rank r.
// All are loaded before the first is stored: the compiler moves no load across a store, so each
// load would wait for memory.
template <class Type, class Packets, int N, class Thread, class G, class Part>
JIN_FN void SendParts(Thread& t, const G& g, uint32_t epoch, size_t slot_bytes, size_t i,
                      const Part& part) {
  Pack p[Ranks<N>::kSlots];
  JIN_UNROLL
  for (int step = 1; step < Ranks<N>::kSlots; ++step) {
    if (Ranks<N>::Has(step, g.size)) p[step] = part(Ranks<N>::After(g.rank, step, g.size));
  }
  t.Admit();
  JIN_UNROLL
  for (int step = 1; step < Ranks<N>::kSlots; ++step) {
    if (Ranks<N>::Has(step, g.size)) {
      const int to = Ranks<N>::After(g.rank, step, g.size);
      Packets::Put(g.EpochBuffer(to, epoch) + SlotOf(g.rank, to) * slot_bytes, i,
                   SendableOf<Type>(t, p[step]));
    }
  }
}

// Between two ranks: sends the first pack of a thread, `load()`, as pack i, if it has `any`.
// Returns what it sent. The answers to Enter and to the load of the epoch travel while the pack is
// loaded and its address is computed. In a loop with Admit they would not: what the compiler
// derives from the answers before the loop waits for them before the first load. Among more ranks
// and in segments the kernels have no registers for this.
template <class Type, class Packets, class Thread, class G, class Load>
JIN_FN Pack SendFirst(Thread& t, const G& g, uint32_t epoch, bool any, size_t i, const Load& load) {
  char* slot = g.EpochBuffer(1 - g.rank, 0);
  Pack p = {};
  if (any) p = load();
  Keep(slot);
  t.Admit();
  if (any) {
    p = SendableOf<Type>(t, p);
    Packets::Put(slot + (g.EpochBuffer(g.rank, epoch) - g.EpochBuffer(g.rank, 0)), i, p);
  }
  return p;
}

// Waits until pack i of every other rank has arrived in this rank's slots, `slot_bytes` apart.
// `unit` is where the phase is resumed if it gives up.
template <class Packets, int N, class Thread, class G>
JIN_FN bool AwaitAll(Thread& t, const G& g, char* slots, size_t slot_bytes, size_t i,
                     Pack (&packs)[Ranks<N>::kSlots], size_t unit) {
  for (;;) {
    int missing = -1;
    JIN_UNROLL
    for (int r = 0; r < Ranks<N>::kSlots; ++r) {
      if (Ranks<N>::Has(r, g.size) && r != g.rank &&
          !Packets::TryGet(slots + SlotOf(r, g.rank) * slot_bytes, i, &packs[r])) {
        missing = r;
      }
    }
    if (missing < 0) return true;
    if (!t.Wait(unit, missing)) return false;
  }
}

// Empties pack i of the slots again, after it has been read.
template <class Packets, int N, class G>
JIN_FN void ArmAll(const G& g, char* slots, size_t slot_bytes, size_t i) {
  JIN_UNROLL
  for (int r = 0; r < Ranks<N>::kSlots; ++r) {
    if (Ranks<N>::Has(r, g.size) && r != g.rank) {
      Packets::Arm(slots + SlotOf(r, g.rank) * slot_bytes, i);
    }
  }
}

// Sums one pack of every rank in rank order and rounds once.
template <class Type, int N>
JIN_FN Pack SumInRankOrder(const Pack (&packs)[Ranks<N>::kSlots], int size) {
  typename Type::Sum sum;
  Type::Start(&sum, packs[0]);
  JIN_UNROLL
  for (int r = 1; r < Ranks<N>::kSlots; ++r) {
    if (Ranks<N>::Has(r, size)) Type::Add(&sum, packs[r]);
  }
  return Type::Round(sum);
}

// Waits for pack i of every other rank, and adds them to this rank's own, which `sum` holds.
template <class Type, class Packets, int N, class Thread, class G>
JIN_FN bool AwaitSum(Thread& t, const G& g, char* slots, size_t slot_bytes, size_t i, Pack* sum,
                     size_t unit) {
  Pack all[Ranks<N>::kSlots];
  JIN_UNROLL
  for (int r = 0; r < Ranks<N>::kSlots; ++r) all[r] = *sum;
  if (!AwaitAll<Packets, N>(t, g, slots, slot_bytes, i, all, unit)) return false;
  *sum =
      WithType<Type>(t, [&](auto type) { return SumInRankOrder<decltype(type), N>(all, g.size); });
  return true;
}

}  // namespace jax_intranode
