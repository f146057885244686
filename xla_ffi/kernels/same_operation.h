// The check that all ranks of a group run the same operation. GPUs use it; on CPU devices calls are
// matched before they begin (host/host_group.h).
//
// Packets carry no name: a kernel takes whatever arrives. So each rank tells each peer what it
// runs, in one word, and no operation ends before all ranks have told the same. (A permute tells
// its destinations and hears its sources, in a region of its own, which other operations do not
// see.) Where ranks differ, the kernel gives up, and no data leave it.
//
//   Who writes peer_operation[e % 2][r] of rank p: rank r, once in operation e. Who reads it: p, in
//   operation e. Nobody clears it: the word holds the lowest bits of e.
//
//   Why the word of e + 2 can't meet the one of e: r writes it after its own operation e + 1 ended,
//   so after p's word of e + 1 had come. p sent that after its operation e had ended.
//
// Operations are counted for this check alone. Collective matmuls take part in it.
//
// tests/native/protocol_test.cc runs it beside the data, also with one word instead of two.
#pragma once

#include <iterator>
#include <string>

#include "algorithms.h"
#include "group.h"

namespace jax_intranode {

// The blocks that a kernel has for the check. They come before those that work on the data.
constexpr int kCheckBlocks = 1;

// What a rank runs: a mark, 15 bits of the operation's count, 6 bits of the algorithm, 42 bits of
// what else must be equal. The mark tells it from a word that was never written.
constexpr uint64_t kOperationMark = uint64_t{1} << 63;
constexpr int kCountShift = 48, kAlgorithmShift = 42, kTypeShift = 38;
constexpr uint64_t kContentMask = (uint64_t{1} << kAlgorithmShift) - 1;

// The lower 48 bits: an operation on `bytes` bytes of elements of a type.
static_assert(std::size(kElementTypes) <= 1 << (kAlgorithmShift - kTypeShift));
static_assert(std::size(kAlgorithms) <= 1 << (kCountShift - kAlgorithmShift));
inline uint64_t OperationWord(Algorithm algorithm, ElementType type, size_t bytes) {
  const uint64_t size = bytes & ((uint64_t{1} << kTypeShift) - 1);
  return static_cast<uint64_t>(algorithm) << kAlgorithmShift |
         static_cast<uint64_t>(type) << kTypeShift | size;
}
// The same of an operation that is described by more than a size.
inline uint64_t OperationWordOfDigest(Algorithm algorithm, uint64_t digest) {
  return static_cast<uint64_t>(algorithm) << kAlgorithmShift | (digest & kContentMask);
}

// An operation by the word that tells of it, for instance "all_gather of 40 bytes". A peer may have
// written anything.
inline std::string ToldOperation(uint64_t word) {
  const uint64_t number = word >> kAlgorithmShift & 63;
  for (const Algorithm algorithm : kAlgorithms) {
    if (static_cast<uint64_t>(algorithm) != number) continue;
    std::string text = OperationName(algorithm);
    if (IsMatmul(algorithm) || IsNorm(algorithm) || RunsInWindows(algorithm)) {
      return text + " of other shapes";
    }
    if (HasOwnRegion(algorithm)) return text + " of other sizes or ranks";
    return text + " of " + std::to_string(word & ((uint64_t{1} << kTypeShift) - 1)) + " bytes";
  }
  return "an operation without a name";
}

JIN_FN uint64_t CountedOperation(uint64_t operation, uint32_t count) {
  return kOperationMark | static_cast<uint64_t>(count & 0x7FFF) << kCountShift | operation;
}

// Tells rank `peer` what this rank runs. `count` is that of the operation: Header()->operations.
template <class G>
JIN_FN void TellOperation(const G& g, int peer, uint32_t count) {
  StorePair(g.OperationOf(g.rank, peer, count), CountedOperation(g.operation, count));
}

// Waits for the word of rank `peer`, and gives up if it runs another operation.
template <class Thread, class G>
JIN_FN void AwaitSameOperation(Thread& t, const G& g, int peer, uint32_t count) {
  uint64_t* const word = g.OperationOf(peer, g.rank, count);
  const uint64_t own = CountedOperation(g.operation, count);
  uint64_t theirs = LoadPair(word);
  while (theirs >> kCountShift != own >> kCountShift) {
    t.Wait(0, peer);
    theirs = LoadPair(word);
  }
  if (theirs != own) t.MeetsOther(peer, theirs);
}

// Gives up if a peer has told by now that it runs another operation. Waits for nothing.
template <class Thread, class G>
JIN_FN void CompareOperations(Thread& t, const G& g) {
  const uint32_t count = Load(&g.Header()->operations);
  const uint64_t own = CountedOperation(g.operation, count);
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int peer = 0; peer < g.size; ++peer) {
    const uint64_t theirs = LoadPair(g.OperationOf(peer, g.rank, count));
    const bool same_count = theirs >> kCountShift == own >> kCountShift;
    if (peer != g.rank && same_count && theirs != own) t.MeetsOther(peer, theirs);
  }
}

// What a block that does nothing else runs: the whole check, with those peers whose bits are set.
// At least g.size threads.
template <class Thread, class G>
JIN_FN void CheckSameOperation(Thread& t, const G& g, uint32_t peers = ~uint32_t{0}) {
  RegionHeader* h = g.Header();
  const uint32_t closed = Load(&h->closed), count = Load(&h->operations);
  t.Admit(0, closed);
  const int peer = t.Thread();
  if (peer < g.size && peer != g.rank && (peers >> peer & 1) != 0) {
    TellOperation(g, peer, count);
    AwaitSameOperation(t, g, peer, count);
  }
  t.Sync();  // every thread has read the count
  if (t.Thread() == 0) Store(&h->operations, count + 1);
}

}  // namespace jax_intranode
