// Operations of several epochs: messages that are larger than an epoch buffer, or than a cache.
//
// The message is cut into segments of equal size. An operation runs its algorithm over one segment
// after the other, each in an epoch of its own, so that the two epoch buffers take turns within the
// operation. How many segments there are follows from the operation's bytes (algorithms.h, the
// selection), so all ranks agree on it, and on the epoch of the next operation.
//
// The last segment has as many packs as the others. Those past the end of the message travel as
// zeros and are not stored. So in every segment of an operation
//   (a) the same threads work: those that have a pack in one segment have one in each, and
//   (b) a thread uses the same addresses of an epoch buffer.
//
// Why one epoch cannot disturb the next (group.h has the argument for operations of one epoch).
// Let an operation take the epochs a ... z. Every thread that works on it receives packets of each
// of them, from the thread of the same number on every other rank. Between two epochs it calls
// NextEpoch(), a fence: what it has received and armed comes before what it sends next.
//   Epoch e from a + 2 to z shares its epoch buffer with e - 2 of the same operation. By (b),
//   thread t of rank r writes where thread t of rank p armed packets of e - 2. It has received a
//   packet of e - 1 from that thread, which p sent after the fence that follows the arming.
//   Epoch a shares its epoch buffer with an epoch that all of p had armed before it sent its
//   packets of a - 1: by a fence if both belong to the last operation, else by the end of a kernel.
//   Rank r has ended that operation, so by (a) it has received a packet of a - 1 from every thread
//   of p that worked on it. Epoch a + 1 shares its epoch buffer with the last epoch of the
//   operation before. Thread t of r writes packets of a + 1 after it has received one of a, which p
//   sent after that operation's kernel had ended.
// The end of an operation needs nothing else: to its successor it is the operation z.
//
// Blocks don't wait for each other: at any time two blocks may be in different segments. A block
// marks itself busy once, at the operation's begin, and stores its epoch once, at the end. Block 0
// stores the epoch of the blocks that were not launched.
//
// The input and the output of a segment are those of the algorithm at other packs, so an algorithm
// allows in place what it allows with one segment.
//
// Model: tests/native/model/collectives_model.cc.
#pragma once

#include "algorithms.h"
#include "group.h"

namespace jax_intranode {

// The call of an algorithm for one segment: `packs` packs, of which the first is pack `begin`.
template <class C>
struct Segment {
  const C& call;
  size_t begin;
  size_t packs;

  // A rank's shard of the input or of the output.
  template <class Shard>
  struct Part {
    Shard shard;
    size_t begin;
    JIN_FN Pack Load(size_t i) const { return shard.Load(begin + i); }
    JIN_FN void Store(size_t i, const Pack& p) const { shard.Store(begin + i, p); }
  };

  JIN_FN size_t Packs() const { return packs; }
  JIN_FN Pack Load(size_t i) const { return call.Load(begin + i); }
  JIN_FN void Store(size_t i, const Pack& p) const { call.Store(begin + i, p); }
  JIN_FN Part<C> InputOf(int r) const { return {call.InputOf(r), begin}; }
  JIN_FN Part<C> OutputOf(int r) const { return {call.OutputOf(r), begin}; }
};

// A call in segments. A call is one of buffers.h.
template <class C>
struct InSegments {
  C call;
  size_t packs;  // of each segment
  uint32_t segments;

  JIN_HOST_FN Segment<C> At(uint32_t k) const { return {call, k * packs, packs}; }
};

// Runs an algorithm. `Algorithm::RunEpoch` runs its phases in one epoch.
template <class Algorithm, class Thread, class G, class C>
JIN_FN bool RunOperation(Thread& t, const G& g, const C& call) {
  const uint32_t epoch = Begin(t, g);
  if (!Algorithm::RunEpoch(t, g, call, epoch)) return false;
  End(t, g, epoch);
  return true;
}

template <class Algorithm, class Thread, class G, class C>
JIN_FN bool RunOperation(Thread& t, const G& g, const InSegments<C>& call) {
  const uint32_t first = Begin(t, g);
  for (uint32_t k = 0;; ++k) {
    if (!Algorithm::RunEpoch(t, g, call.At(k), first + k)) return false;
    if (k + 1 == call.segments) break;
    t.NextEpoch();
  }
  End(t, g, first + call.segments - 1);
  return true;
}

}  // namespace jax_intranode
