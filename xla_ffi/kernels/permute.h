// Permutes: each rank sends its operand to at most one rank, and gets that of at most one.
//
// A permute does not tell every rank that every other one has come as far, so the argument of
// group.h does not hold for it. Permutes have a region of their own, with its own epochs, and this
// argument. Every rank of the group runs every permute, also one that sends nothing or gets
// nothing, so the epoch is the number of the call, and it is the same on all ranks.
//
//   begun[r] in a rank's header: written by rank r only, read by the owner. Rank r stores the
//   number of each call there, on all ranks, as the first thing that it does in that call. The
//   number only grows (and wraps), the last one counts, and nobody clears it.
//
//   Who writes an epoch buffer: a rank that sends to its owner in a call of that parity. In call e
//   it waits for begun[owner] >= e - 1 before its first store. Who reads it: the owner, in call e.
//   Who clears it: the owner arms each packet as soon as it has read it.
//
//   Why packets of call e can't meet those of an earlier call in the same epoch buffer: the owner
//   has begun call e - 1, so its call e - 2 has ended. By then it had read and armed the packets of
//   all calls up to e - 2, from whichever ranks they came. The end of a kernel orders its arming
//   before the store of begun. The sender's acquiring load of begun orders that before the packets
//   of its thread, and the barrier of its block before those of the block's other threads
//   (AwaitRoom). So calls need not have the same sources, and one slot for all of them will do.
//   With begun >= e - 2 a rank that only sends would overwrite what has not been read.
//
//   Why nobody waits for ever: of the calls that have not ended on all ranks, take the first one,
//   c. No rank is in an earlier call. All destinations of a rank in c have begun c - 1, so it
//   sends. Its sources are in c, and send, or have ended c, and have sent. A rank waits for its
//   sources, and for its destinations only if they are two calls behind; other ranks delay nobody.
//
// One call may have several members, with arrays and a permutation each. Their packs lie one after
// another in the epoch buffer, as in buffers.h.
//
// Model: tests/native/model/permute_model.cc.
#pragma once

#include "same_operation.h"

namespace jax_intranode {

// The most members of one call. It fits a kernel's parameters.
constexpr int kMaxMembers = 16;

// The members of a call, as a rank sees them. -1: it sends nothing, or gets nothing and its result
// is zero.
struct Permutes {
  Buffer buffer[kMaxMembers];
  uint32_t end[kMaxMembers];  // the pack after the last one of each
  int source[kMaxMembers], destination[kMaxMembers];
  uint32_t sources = 0, destinations = 0;  // of all members; bit r: rank r
  int count = 0;

  // Host only. `count` must be less than kMaxMembers.
  void Append(const Buffer& b, int from, int to) {
    if (from >= 0) sources |= 1u << from;
    if (to >= 0) destinations |= 1u << to;
    buffer[count] = b;
    end[count] = static_cast<uint32_t>(Packs() + PacksOf(b.bytes));
    source[count] = from;
    destination[count] = to;
    ++count;
  }
  JIN_HOST_FN size_t Packs() const { return count == 0 ? 0 : end[count - 1]; }
  // The member that pack i belongs to.
  JIN_PACK_FN int Member(size_t i) const {
    int m = 0;
    while (i >= end[m]) ++m;
    return m;
  }
  JIN_PACK_FN Pack Load(int m, size_t i) const { return buffer[m].Load(i - Begin(m)); }
  JIN_PACK_FN void Store(int m, size_t i, const Pack& p) const { buffer[m].Store(i - Begin(m), p); }

 private:
  JIN_PACK_FN size_t Begin(int m) const { return m == 0 ? 0 : end[m - 1]; }
};

// The common case: one member of whole, aligned packs.
struct AlignedPermute {
  AlignedBuffer buffer;
  int source[1], destination[1];
  uint32_t sources, destinations;

  JIN_FN size_t Packs() const { return buffer.Packs(); }
  JIN_PACK_FN int Member(size_t) const { return 0; }
  JIN_PACK_FN Pack Load(int, size_t i) const { return buffer.Load(i); }
  JIN_PACK_FN void Store(int, size_t i, const Pack& p) const { buffer.Store(i, p); }
};

// Where rank `of` tells rank `to` which permute it has begun.
template <class G>
JIN_FN uint32_t* BegunOf(const G& g, int of, int to) {
  return &reinterpret_cast<RegionHeader*>(g.region[to])->begun[of];
}

// Tells rank `peer` that this rank has begun call `epoch`.
template <class G>
JIN_FN void TellBegun(const G& g, int peer, uint32_t epoch) {
#if defined(__CUDACC__)
  Store(BegunOf(g, g.rank, peer), epoch);  // the end of the last kernel comes before
#else
  v1::StoreRelease(BegunOf(g, g.rank, peer), epoch);
#endif
}

// Whether the epoch buffer of rank `to` is free for call `epoch`.
template <class G>
JIN_FN bool HasRoom(const G& g, int to, uint32_t epoch) {
  return static_cast<int32_t>(LoadAcquire(BegunOf(g, to, g.rank)) - (epoch - 1)) >= 0;
}

// Waits until all destinations have room. For each of them one thread of the block looks: on GPUs
// an acquiring load waits for its answer and empties the L1 cache, so the others do without. They
// pass a barrier, which is cumulative, before they store. False: a wait was given up; the phase is
// resumed at pack i.
template <class Thread, class G, class C>
JIN_FN bool AwaitRoom(Thread& t, const G& g, const C& c, uint32_t epoch, size_t i) {
  for (int to = t.Thread(); to < g.size; to += t.Threads()) {
    if (to == g.rank || (c.destinations >> to & 1) == 0) continue;
    while (!HasRoom(g, to, epoch)) {
      if (!t.Wait(i, to)) return false;
    }
  }
  t.Arrived();
  t.Sync();
  return true;
}

template <class Type, int N, class PacketsOfType>
struct Permute {
  using Packets = PacketsOfType;

  template <class Thread, class G, class C>
  JIN_FN static bool Send(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t packs = c.Packs();
    size_t i = t.First();
    int m = 0, to = -1;
    Pack p;
    const auto load = [&] {
      if (i >= packs) return;
      m = c.Member(i);
      to = c.destination[m];
      if (to >= 0) p = c.Load(m, i);
    };
    load();  // the answers to Enter and HasRoom take as long
    if (!AwaitRoom(t, g, c, epoch, i)) return false;
    t.Admit();
    for (; i < packs; i += t.Stride(), load()) {
      if (to < 0) continue;
      p = SendableOf<Type>(t, p);
      if (to == g.rank) {
        c.Store(m, i, p);  // as it would be sent
      } else {
        Packets::Put(g.EpochBuffer(to, epoch), i, p);
      }
    }
    return true;
  }

  template <class Thread, class G, class C>
  JIN_FN static bool Take(Thread& t, const G& g, const C& c, uint32_t epoch) {
    const size_t packs = c.Packs();
    char* const slot = g.EpochBuffer(g.rank, epoch);
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      const int m = c.Member(i), from = c.source[m];
      if (from == g.rank) continue;
      Pack p = {};
      if (from >= 0) {
        while (!Packets::TryGet(slot, i, &p)) {
          if (!t.Wait(i, from)) return false;
        }
        Packets::Arm(slot, i);
      }
      c.Store(m, i, p);
    }
    return true;
  }

  static constexpr int kPhases = 2;
  template <class Thread, class G, class C>
  JIN_FN static bool RunPhase(int phase, Thread& t, const G& g, const C& c, uint32_t epoch) {
    return phase == 0 ? Send(t, g, c, epoch) : Take(t, g, c, epoch);
  }
};

// What the block runs that comes before those that work on the data: it tells all ranks that this
// call has begun, the destinations which operation it is, and compares that with the sources'. At
// least g.size threads.
//
//   Who writes peer_operation[e % 2][r] of rank p: rank r, if it sends to p in call e, when it has
//   room there. Who reads it: p, in call e. It can't meet the word of call e - 2 for the same
//   reason as packets can't. Who clears it: p, when it has read it. The word holds only the lowest
//   bits of e, and r may send to p again many calls later.
//
//   So a rank finds no word of a rank that is not its source, unless that one has another
//   permutation. A word that comes after it has looked is found two calls later.
template <class Thread, class G, class C>
JIN_FN void BeginPermute(Thread& t, const G& g, const C& c) {
  RegionHeader* h = g.Header();
  const uint32_t closed = Load(&h->closed), epoch = Load(&h->operations);
  const int peer = t.Thread();
  const bool is_peer = peer < g.size && peer != g.rank;
  const bool is_source = is_peer && (c.sources >> peer & 1) != 0;
  const bool is_destination = is_peer && (c.destinations >> peer & 1) != 0;
  bool has_room = is_destination && HasRoom(g, peer, epoch);  // one wait for all three answers
  t.Admit(0, closed);
  if (is_peer) TellBegun(g, peer, epoch);
  if (is_destination) {
    for (; !has_room; has_room = HasRoom(g, peer, epoch)) t.Wait(0, peer);
    t.Arrived();  // a wait for the source is timed by itself
    TellOperation(g, peer, epoch);
  }
  if (is_source) {
    AwaitSameOperation(t, g, peer, epoch);
    StorePair(g.OperationOf(peer, g.rank, epoch), 0);
  } else if (is_peer) {
    const uint64_t told = LoadPair(g.OperationOf(peer, g.rank, epoch));
    if (told != 0) t.MeetsOther(peer, told);
  }
  t.Sync();  // every thread has read the count
  if (t.Thread() == 0) Store(&h->operations, epoch + 1);
}

}  // namespace jax_intranode
