// Operations in segments: messages that are larger than an epoch buffer, or than a cache.
//
// The message is cut into segments of equal size, an even number of them. How many there are
// follows from the operation's bytes (algorithms.h, the selection), so all ranks agree on it, and
// on the epoch of the next operation. An operation runs the phases of its algorithm over the
// segments so that links are never idle: while a thread takes what has arrived of one segment, the
// next one travels.
//
//   two phases (all but two-shot)   Send 0, Send 1, Take 0, | Send 2, Take 1, | Send 3, Take 2 ...
//   two-shot                        Scatter 0, Reduce 0, | Scatter 1, Drain 0, | Reduce 1,
//                                   | Scatter 2, Drain 1, | Reduce 2 ... Drain z
//
// A | is a fence: what the thread has received and armed before comes before what it sends next.
// z is the last segment.
//
// Memory. Segment s of an algorithm of two phases uses window s % 4: half of an epoch buffer, so
// two segments share an epoch. Segment s of two-shot has an epoch of its own.
//
// The last segment has as many packs as the others. Those past the end of the message travel as
// zeros and are not stored. So in every segment of an operation
//   (a) the same threads work: those that have a pack in one segment have one in each, and
//   (b) a thread uses the same addresses of a window, or of an epoch buffer.
//
// Why a packet cannot disturb an earlier one (group.h has the argument for operations of one
// epoch). By (a) and (b) it is enough to look at thread t of rank r, which sends, and at thread t
// of rank p, which receives, reads and arms. r has "heard" of what p did if it has received a
// packet that p sent later, behind a fence or in another kernel, and has passed a fence or the end
// of a kernel.
//
//   Two phases. r sends s + 2 behind the fence after Take s. p sent s behind the fence after
//   Take s - 2. So r has heard that p armed s - 2, whose window s + 2 uses.
//   Two-shot, scatter slots. r sends Scatter k + 1 behind the fence after Reduce k, in which it
//   received Scatter k of p. p sent that behind the fence after Reduce k - 1, in which it armed the
//   scatter slots of k - 1.
//   Two-shot, gather slots. r sends the sums of k + 1 behind the fence after Drain k, in which it
//   received the sums of k of p. p sent these behind the fence after Drain k - 1, in which it armed
//   the gather slots of k - 1.
//
//   The first epochs. Let a be the first epoch of an operation in segments. What r sends in epoch a
//   goes into the buffer of epoch a - 2: group.h says why this is safe if a - 1 is an operation of
//   one epoch, and the next paragraph if a - 1 belongs to an operation in segments. What r sends in
//   epoch a + 1 goes into the buffer of a - 1. r has received a packet of epoch a from p before,
//   and p's kernel sent it after all of p's earlier operations had ended.
//
//   The next operation. Let a be its first epoch. All threads of r have ended the operation in
//   segments, so by (a) they have heard of all threads of p that worked on it. They send into the
//   buffer of a - 2. Two phases with S segments: epoch a - 1 had the segments S - 2 and S - 1, and
//   epoch a - 2 had S - 4 and S - 3. p sent S - 1 behind the fence after Take S - 3. The number of
//   segments is even: else epoch a - 2 would have a segment that p armed after its last fence. (If
//   S is 2, epoch a - 2 belongs to an operation that p had ended before it sent S - 1.)
//   Two-shot: p sent its sums of z behind the fence after Drain z - 1.
//
// Blocks don't wait for each other: at any time two blocks may be in different segments. A block
// marks itself busy once, at the operation's begin, and stores its epoch once, at the end. Block 0
// stores the epoch of the blocks that were not launched.
//
// The input and the output of a segment are those of the algorithm at other packs, so an algorithm
// allows in place what it allows with one segment.
//
// What a segment costs: docs/how_it_works.md, "Large arrays".
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
    JIN_PACK_FN Pack Load(size_t i) const { return shard.Load(begin + i); }
    JIN_PACK_FN void Store(size_t i, const Pack& p) const { shard.Store(begin + i, p); }
  };

  JIN_FN size_t Packs() const { return packs; }
  JIN_PACK_FN Pack Load(size_t i) const { return call.Load(begin + i); }
  JIN_PACK_FN void Store(size_t i, const Pack& p) const { call.Store(begin + i, p); }
  JIN_FN Part<C> InputOf(int r) const { return {call.InputOf(r), begin}; }
  JIN_FN Part<C> OutputOf(int r) const { return {call.OutputOf(r), begin}; }
};

template <class C>
constexpr bool kIsSegment<Segment<C>> = true;

// A call in segments. A call is one of buffers.h.
template <class C>
struct InSegments {
  C call;
  size_t packs;  // of each segment
  uint32_t segments;

  JIN_HOST_FN Segment<C> At(uint32_t k) const { return {call, k * packs, packs}; }
};

// The epochs of an operation: of an algorithm of two phases, two segments share one.
JIN_HOST_FN uint32_t Epochs(int phases, uint32_t segments) {
  return phases == 2 && segments > 1 ? segments / 2 : segments;
}

// One phase of an algorithm over one segment.
struct Step {
  uint32_t segment;
  int phase;
  bool fence;  // before it
};

// The `phases * segments` steps of an operation.
struct Schedule {
  JIN_HOST_FN static Step At(int phases, uint32_t segments, uint32_t i);
};

JIN_HOST_FN Step Schedule::At(int phases, uint32_t segments, uint32_t i) {
  if (segments == 1) return {0, static_cast<int>(i), false};
  const uint32_t last = phases * segments - 1;
  if (phases == 2) {
    if (i == 0) return {0, 0, false};
    if (i == last) return {segments - 1, 1, false};
    const uint32_t pair = (i - 1) / 2;
    return i % 2 == 1 ? Step{pair + 1, 0, pair > 0} : Step{pair, 1, false};
  }
  if (i < 2) return {0, static_cast<int>(i), false};
  if (i == last) return {segments - 1, 2, false};
  const uint32_t k = (i - 2) / 3;
  switch ((i - 2) % 3) {
    case 0:
      return {k + 1, 0, true};
    case 1:
      return {k, 2, false};
    default:
      return {k + 1, 1, true};
  }
}

// The group as an operation in segments sees it. It takes the number of a window for an epoch.
template <class G>
struct Windows {
  const G& group;
  uint32_t first_epoch;
  size_t half;  // bytes of a window that shares its epoch buffer with another one
  int rank = group.rank, size = group.size;

  JIN_FN char* EpochBuffer(int of_rank, uint32_t window) const {
    return group.EpochBuffer(of_rank, first_epoch + window / 2) + window % 2 * half;
  }
};

// Runs the steps of an operation from `*step` on. False: a wait was given up; the step may be
// resumed.
template <class Algorithm, class Steps = Schedule, class Thread, class G, class Cut>
JIN_FN bool RunSteps(Thread& t, const G& g, const Cut& cut, uint32_t first_epoch, uint32_t* step) {
  const size_t half = (g.size - 1) * cut.packs * Algorithm::Packets::kBytes;
  const Windows<G> windows{g, first_epoch, half};
  for (; *step < Algorithm::kPhases * cut.segments; ++*step) {
    const Step s = Steps::At(Algorithm::kPhases, cut.segments, *step);
    if (s.fence) t.FenceSegment();
    const auto segment = cut.At(s.segment);
    if constexpr (Algorithm::kPhases == 2) {
      if (!Algorithm::RunPhase(s.phase, t, windows, segment, s.segment)) return false;
    } else {
      if (!Algorithm::RunPhase(s.phase, t, g, segment, first_epoch + s.segment)) return false;
    }
  }
  return true;
}

// Runs an algorithm.
template <class Algorithm, class Thread, class G, class C>
JIN_FN bool RunOperation(Thread& t, const G& g, const C& call) {
  const uint32_t epoch = Begin(t, g);
  JIN_UNROLL
  for (int phase = 0; phase < Algorithm::kPhases; ++phase) {
    if (!Algorithm::RunPhase(phase, t, g, call, epoch)) return false;
  }
  End(t, g, epoch);
  return true;
}

template <class Algorithm, class Thread, class G, class C>
JIN_FN bool RunOperation(Thread& t, const G& g, const InSegments<C>& call) {
  const uint32_t first = Begin(t, g);
  uint32_t step = 0;
  if (!RunSteps<Algorithm>(t, g, call, first, &step)) return false;
  End(t, g, first + Epochs(Algorithm::kPhases, call.segments) - 1);
  return true;
}

}  // namespace jax_intranode
