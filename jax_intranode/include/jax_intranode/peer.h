// Kernels of your own on a peer buffer (`jax_intranode.peer_buffer`): memory that every rank of a
// group can read and write. One source serves GPUs (nvcc) and CPU devices (a C++ compiler). The
// names that docs/own_kernels.md lists are public. All others in this namespace may change.
//
// A kernel is a body: a function object that gets a thread and the peers, and has this form.
//
//   template <class Thread>
//   JAX_INTRANODE_FN void operator()(Thread& t, const Peers& p) const {
//     const uint32_t epoch = Begin(t, p);
//     ... store into Half(p, peer, epoch), take what arrives in Half(p, p.rank, epoch) ...
//     End(t, p);
//   }
//
// Every rank runs the same calls in the same order. In a call all ranks have the same grid. A block
// may wait for the block of the same number on another rank. It must not wait for another block of
// its own grid.
//
// Why one call can't meet the last one
//   The data of a buffer have two halves, and calls alternate between them. Block b's End() waits
//   until block b of every peer has begun this call. A kernel begins when the last one has ended
//   (stream order; no programmatic dependent launch). Let call e + 1 of a rank end. Then every peer
//   has begun call e + 1, so every peer has ended call e. So call e + 2, which uses the half of
//   call e again, finds no rank that still reads or clears it. This does not depend on who sends to
//   whom, on sizes, or on the number of blocks. All ranks have the same ones in a call, and they
//   may change from one call to the next. One half would not do: a fast rank may be in call e + 1
//   while a slow one still reads the data of call e.
//
//   epoch[b]                The number of calls so far. Its owner's block b reads it, and advances
//                           it at the end; block 0 advances those of blocks that were not launched.
//                           `Begin` returns it. It may wrap.
//   busy[b]                 The owner's block b sets it at the beginning and clears it at the end.
//                           A call that finds it set overlaps with another one, and gives up.
//   begun[b]                How many calls that launched block b have ended; the owner's block b
//                           writes it.
//   peer_begun[b][r]        Rank r's block b stores here the number of the call that it begins. The
//                           owner's block b waits for it. It only grows, and r is at most
//                           one call ahead. Nobody clears it.
//   barriers, peer_barriers The same, for Barrier().
//   closed                  The host sets it when the buffer is closed.
//
// All words are in device memory and kernels advance them. So a call that is replayed from a CUDA
// graph is no different from one that the host launched.
//
// On GPUs a wait that lasts longer than JAX_INTRANODE_TIMEOUT_S, or that the host ends because a
// peer is lost, writes a record and traps: no wrong data leave the GPU, XLA raises an error, and
// its message says which rank waited for which. On the CPU the waiting function returns false, and
// the body returns at once; the call fails with the same message.
#pragma once

#include <cstring>
#include <type_traits>

#include "device.h"

#if !defined(__CUDACC__)
#include <thread>
#endif

namespace jax_intranode::v1 {

// The memory of a rank.

JAX_INTRANODE_FN PeerHeader* Header(const Peers& p, int rank) {
  return reinterpret_cast<PeerHeader*>(p.memory[rank]);
}
JAX_INTRANODE_FN char* Data(const Peers& p, int rank) { return p.memory[rank] + kHeaderBytes; }
// The half of the data that the call with this epoch uses. It begins at a multiple of 16 bytes.
JAX_INTRANODE_HOST_FN uint64_t HalfBytes(const Peers& p) { return p.bytes / 32 * 16; }
JAX_INTRANODE_FN char* Half(const Peers& p, int rank, uint32_t epoch) {
  return Data(p, rank) + (epoch & 1) * HalfBytes(p);
}

// The thread of a body. Both kinds have the same functions:
//   First(), Stride()   the elements that this thread works on
//   Thread(), Threads(), Block(), Blocks(), Sync()   as in CUDA
//   Wait(missing)       to be called each time that something of rank `missing` (0 to size - 1) has
//                       not arrived. False: give up, return at once.
//   Arrived()           to be called when it has arrived: the next wait has a deadline of its own.

#if defined(__CUDACC__)

class DeviceThread : public WaitingThread<DeviceThread> {
 public:
  __device__ explicit DeviceThread(const Peers& p)
      : WaitingThread(p.record, p.timeout_ns, p.site) {}

  __device__ int Block() const { return blockIdx.x; }
  __device__ int Blocks() const { return gridDim.x; }
  __device__ size_t First() const {
    return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  }
  __device__ size_t Stride() const { return static_cast<size_t>(gridDim.x) * blockDim.x; }

  __device__ void GiveUp(uint32_t reason, int missing) {
    Trap(reason, missing, [](PeerRecord*) {});
  }
};

#else

// One thread works on all elements of a rank. jax_intranode measures the time, and sets `abort`.
class HostThread {
 public:
  explicit HostThread(HostWait* wait) : wait_(wait) {}

  int Thread() const { return 0; }
  int Threads() const { return 1; }
  int Block() const { return 0; }
  int Blocks() const { return 1; }
  void Sync() const {}
  size_t First() const { return 0; }
  size_t Stride() const { return 1; }

  bool Wait(int missing) {
    std::atomic_ref<int32_t>(wait_->missing).store(missing, std::memory_order_relaxed);
    if (std::atomic_ref<uint32_t>(wait_->abort).load(std::memory_order_relaxed) != 0) return false;
    std::this_thread::yield();
    return true;
  }
  void Arrived() const {}

  // Nothing to check: calls of a group run one at a time, and a closed buffer is not called.
  void Admit(uint32_t, uint32_t) const {}

 private:
  HostWait* wait_;
};

#endif

// Waits until a word that rank `rank` advances has reached `value`. What the rank did before its
// StoreRelease is visible then. Words may wrap. False: give up.
template <class Thread>
JAX_INTRANODE_FN bool AwaitAtLeast(Thread& t, uint32_t* word, uint32_t value, int rank) {
  while (static_cast<int32_t>(LoadAcquire(word) - value) < 0) {
    if (!t.Wait(rank)) return false;
  }
  t.Arrived();
  return true;
}

// Begins a call: tells all peers, and returns the epoch. All threads of the block call it.
template <class Thread>
JAX_INTRANODE_FN uint32_t Begin(Thread& t, const Peers& p) {
  PeerHeader* h = Header(p, p.rank);
  const int b = t.Block();
  const uint32_t epoch = Load(&h->epoch[b]), call = Load(&h->begun[b]) + 1;
  if (t.Thread() == 0) t.Admit(Exchange(&h->busy[b], 1), Load(&h->closed));
  t.Sync();
  for (int r = t.Thread(); r < p.size; r += t.Threads()) {
    if (r == p.rank) continue;
    uint32_t* const word = &Header(p, r)->peer_begun[b][p.rank];
#if defined(__CUDACC__)
    Store(word, call);  // the end of the last kernel comes before all stores of this one
#else
    StoreRelease(word, call);
#endif
  }
  return epoch;
}

// Ends a call: see above. All threads of the block call it, last of all. False: it was given up.
template <class Thread>
JAX_INTRANODE_FN bool End(Thread& t, const Peers& p) {
  PeerHeader* h = Header(p, p.rank);
  const int b = t.Block();
  const uint32_t epoch = Load(&h->epoch[b]), call = Load(&h->begun[b]) + 1;
  for (int r = t.Thread(); r < p.size; r += t.Threads()) {
    if (r != p.rank && !AwaitAtLeast(t, &h->peer_begun[b][r], call, r)) return false;
  }
  t.Sync();  // every thread of the block has read the words, and cleared what it took
  if (t.Thread() == 0) {
    Store(&h->epoch[b], epoch + 1);
    Store(&h->begun[b], call);
    Store(&h->busy[b], 0);
  }
  if (b == 0) {
    for (int other = t.Blocks() + t.Thread(); other < kMaxBlocks; other += t.Threads()) {
      Store(&h->epoch[other], epoch + 1);
    }
  }
  return true;
}

// Waits until the blocks of this number on all ranks have come to the same barrier of a call. What
// any of their threads stored before is visible afterwards. All threads of the block call it, as
// often on every rank. False: give up.
template <class Thread>
JAX_INTRANODE_FN bool Barrier(Thread& t, const Peers& p) {
  PeerHeader* h = Header(p, p.rank);
  const int b = t.Block();
  const uint32_t number = Load(&h->barriers[b]) + 1;
  t.Sync();
  for (int r = t.Thread(); r < p.size; r += t.Threads()) {
    if (r != p.rank) StoreRelease(&Header(p, r)->peer_barriers[b][p.rank], number);
  }
  for (int r = t.Thread(); r < p.size; r += t.Threads()) {
    if (r != p.rank && !AwaitAtLeast(t, &h->peer_barriers[b][r], number, r)) return false;
  }
  if (t.Thread() == 0) Store(&h->barriers[b], number);
  t.Sync();
  return true;
}

// Packets: data that show by themselves that they have arrived. A packet carries a value of 4, 8 or
// 16 bytes in twice as many. A 64-bit word holds 32 bits of the value and a mark. It is loaded and
// stored at once. Memory of zeros is empty. One rank puts packet i, its owner takes it
// and clears it; nobody else touches it. Values of any bits are allowed.

template <class T>
constexpr size_t kPacketBytes = 2 * sizeof(T);

// Stores packet i of the packets at `slot`, which is a multiple of 16 bytes.
template <class T>
JAX_INTRANODE_FN void Put(char* slot, size_t i, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> &&
                (sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16));
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
  uint64_t* to = reinterpret_cast<uint64_t*>(slot + i * kPacketBytes<T>);
  if constexpr (sizeof(T) >= 8) {
    for (size_t k = 0; k < sizeof(T) / 4; k += 2) {
      StorePairs(to + k, 1ull << 32 | words[k], 1ull << 32 | words[k + 1]);
    }
  } else {
    StorePair(to, 1ull << 32 | words[0]);
  }
}

// True when packet i has arrived: then `value` holds it, and the packet is cleared.
template <class T>
JAX_INTRANODE_FN bool TryTake(char* slot, size_t i, T* value) {
  constexpr int kWords = sizeof(T) / 4;
  uint64_t* from = reinterpret_cast<uint64_t*>(slot + i * kPacketBytes<T>);
  uint64_t pairs[kWords];
  bool arrived = true;
  if constexpr (kWords > 1) {
    for (int k = 0; k < kWords; k += 2) LoadPairs(from + k, pairs + k);
  } else {
    pairs[0] = LoadPair(from);
  }
  for (const uint64_t pair : pairs) arrived = arrived && (pair >> 32) != 0;
  if (!arrived) return false;
  uint32_t words[kWords];
  for (int k = 0; k < kWords; ++k) words[k] = static_cast<uint32_t>(pairs[k]);
  if constexpr (kWords > 1) {
    for (int k = 0; k < kWords; k += 2) StorePairs(from + k, 0, 0);
  } else {
    StorePair(from, 0);
  }
  memcpy(value, words, sizeof(T));
  return true;
}

// Waits for packet i, which rank `rank` puts. False: give up.
template <class T, class Thread>
JAX_INTRANODE_FN bool Take(Thread& t, char* slot, size_t i, T* value, int rank) {
  while (!TryTake(slot, i, value)) {
    if (!t.Wait(rank)) return false;
  }
  t.Arrived();
  return true;
}

}  // namespace jax_intranode::v1
