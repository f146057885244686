// What kernels on the memory of several devices have in common: loads and stores of words that
// others access at the same time, and how a thread waits and gives up. One source serves GPUs
// (nvcc) and CPU devices (a C++ compiler). docs/own_kernels.md lists the public names.
#pragma once

#include "peer_types.h"

#if defined(__CUDACC__)
#define JAX_INTRANODE_FN __device__ __forceinline__
#define JAX_INTRANODE_HOST_FN __host__ __device__ __forceinline__
#else
#include <atomic>
#define JAX_INTRANODE_FN inline
#define JAX_INTRANODE_HOST_FN inline
#endif

// The rare end of a wait is compiled as a call. One of our kernels that must not call functions
// defines this macro otherwise.
#ifndef JAX_INTRANODE_GIVE_UP_FN
#define JAX_INTRANODE_GIVE_UP_FN __device__ __noinline__
#endif

namespace jax_intranode::v1 {

// All accesses but Exchange are of system scope, and relaxed where the name says nothing else.

JAX_INTRANODE_FN uint32_t Load(uint32_t* from) {
#if defined(__CUDACC__)
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
#else
  return std::atomic_ref<uint32_t>(*from).load(std::memory_order_relaxed);
#endif
}

// What the writer did before its StoreRelease is visible after this has returned the value.
JAX_INTRANODE_FN uint32_t LoadAcquire(uint32_t* from) {
#if defined(__CUDACC__)
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
#else
  return std::atomic_ref<uint32_t>(*from).load(std::memory_order_acquire);
#endif
}

JAX_INTRANODE_FN uint64_t LoadAcquire(uint64_t* from) {
#if defined(__CUDACC__)
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
#else
  return std::atomic_ref<uint64_t>(*from).load(std::memory_order_acquire);
#endif
}

JAX_INTRANODE_FN void Store(uint32_t* to, uint32_t v) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
#else
  std::atomic_ref<uint32_t>(*to).store(v, std::memory_order_relaxed);
#endif
}

JAX_INTRANODE_FN void StoreRelease(uint32_t* to, uint32_t v) {
#if defined(__CUDACC__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
#else
  std::atomic_ref<uint32_t>(*to).store(v, std::memory_order_release);
#endif
}

// Of device scope on GPUs: only for words of this rank's own memory that no peer writes.
JAX_INTRANODE_FN uint32_t Exchange(uint32_t* at, uint32_t v) {
#if defined(__CUDACC__)
  return atomicExch(at, v);
#else
  return std::atomic_ref<uint32_t>(*at).exchange(v, std::memory_order_relaxed);
#endif
}

// 64 bits, stored and loaded whole.
JAX_INTRANODE_FN void StorePair(uint64_t* to, uint64_t v) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
#else
  std::atomic_ref<uint64_t>(*to).store(v, std::memory_order_relaxed);
#endif
}

JAX_INTRANODE_FN uint64_t LoadPair(uint64_t* from) {
#if defined(__CUDACC__)
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
#else
  return std::atomic_ref<uint64_t>(*from).load(std::memory_order_relaxed);
#endif
}

// Two of them in one access on GPUs. Each is whole, but one may be newer than the other.
JAX_INTRANODE_FN void StorePairs(uint64_t* to, uint64_t first, uint64_t second) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second)
               : "memory");
#else
  StorePair(to, first);
  StorePair(to + 1, second);
#endif
}

JAX_INTRANODE_FN void LoadPairs(uint64_t* from, uint64_t* pairs) {
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pairs[0]), "=l"(pairs[1])
               : "l"(from)
               : "memory");
#else
  pairs[0] = LoadPair(from);
  pairs[1] = LoadPair(from + 1);
#endif
}

// Orders what this thread has loaded and stored before what it stores next, for all ranks.
JAX_INTRANODE_FN void Fence() {
#if defined(__CUDACC__)
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
  std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
}

// When a wait looks at the clock, and how long it has lasted then.
class WaitTimer {
 public:
  // Counts a poll; whether it is one of the few that look at the clock.
  JAX_INTRANODE_FN bool Poll() { return ++polls_ % 1024 == 0; }
  // Nanoseconds since this wait first looked at the clock.
  JAX_INTRANODE_FN uint64_t Waited(uint64_t now) {
    if (started_ns_ == 0) {
      started_ns_ = now;
      look_ns_ = now + kLookEveryNs;
    }
    return now - started_ns_;
  }
  // Whether to read host memory, too: every 10 ms.
  JAX_INTRANODE_FN bool Looks(uint64_t now) {
    if (now < look_ns_) return false;
    look_ns_ = now + kLookEveryNs;
    return true;
  }
  JAX_INTRANODE_FN void End() {
    polls_ = 0;
    started_ns_ = 0;
  }

 private:
  static constexpr uint64_t kLookEveryNs = 10'000'000;
  uint64_t started_ns_ = 0;
  uint64_t look_ns_ = 0;
  uint32_t polls_ = 0;
};

#if defined(__CUDACC__)

// What threads of all kernels have. `Self` derives from it, and has GiveUp(reason, missing).
template <class Self>
class WaitingThread {
 public:
  __device__ WaitingThread(PeerRecord* record, uint64_t timeout_ns, uint32_t site)
      : record_(record), timeout_ns_(timeout_ns), site_(site) {}

  __device__ int Thread() const { return threadIdx.x; }
  __device__ int Threads() const { return blockDim.x; }
  __device__ void Sync() const { __syncthreads(); }

  // Only one of the waiting threads of a warp reads the clock and host memory, and only rarely.
  // Reading host memory takes longer the more threads do it. When all threads of a grid did, a rank
  // that had waited 1 ms was 1 ms late itself, the next rank waited for it, and the delay went
  // round (2 H200s: 1 ms per operation instead of 9 us, for seconds). WaitAnd: such a thread calls
  // `rarely()` before it reads the clock.
  template <class Rarely>
  __device__ bool WaitAnd(int missing, Rarely&& rarely) {
    if (!timer_.Poll() || (threadIdx.x & 31) != __ffs(__activemask()) - 1) return true;
    rarely();
    const uint64_t now = Nanoseconds(), waited = timer_.Waited(now);
    if (waited > timeout_ns_) self().GiveUp(kTimedOut, missing);
    if (timer_.Looks(now)) {
      if (*static_cast<volatile uint32_t*>(&record_->abort) != 0) self().GiveUp(kAborted, missing);
      if (waited > kLongNs) {
        *static_cast<volatile uint64_t*>(&record_->wait) =
            site_ | static_cast<uint64_t>(missing & 0xFF) << 32 | (waited / 10'000'000) << 40;
      }
    }
    return true;
  }
  __device__ bool Wait(int missing) {
    return WaitAnd(missing, [] {});
  }
  __device__ void Arrived() { timer_.End(); }

  // Gives up if another call is in flight, or if the memory is closed.
  __device__ void Admit(uint32_t busy, uint32_t closed) {
    if ((busy | closed) != 0) self().GiveUp(closed != 0 ? kClosed : kBusy, -1);
  }

 protected:
  // Writes the record and traps. The context is lost, so no data leave it, and XLA raises an error.
  // `more(record)` writes what else a record has.
  template <class More>
  __device__ void Trap(uint32_t reason, int missing, More more) {
    RecordAndTrap(record_, reason, missing, site_, more);
  }

 private:
  static constexpr uint64_t kLongNs = 1'000'000'000;

  __device__ Self& self() { return *static_cast<Self*>(this); }

  __device__ static uint64_t Nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
  }

  // Later threads give the first one time to write.
  template <class More>
  JAX_INTRANODE_GIVE_UP_FN static void RecordAndTrap(PeerRecord* record, uint32_t reason,
                                                     int missing, uint32_t site, More more) {
    if (atomicCAS(&record->claimed, 0u, 1u) == 0) {
      record->missing = missing;
      record->site = site;
      more(record);
      __threadfence_system();
      *static_cast<volatile uint32_t*>(&record->reason) = reason;
      __threadfence_system();
    } else {
      const uint64_t start = Nanoseconds();
      while (Nanoseconds() - start < 10'000'000) {
      }
    }
    __trap();
  }

  PeerRecord* record_;
  uint64_t timeout_ns_;
  WaitTimer timer_;
  uint32_t site_;
};

#endif

}  // namespace jax_intranode::v1
