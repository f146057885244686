// The thread context of group.h on a GPU: how a device thread waits, and how it gives up.
#pragma once

#include "../kernels/algorithms.h"
#include "../kernels/memory.h"
#include "../kernels/same_operation.h"
#include "failure.h"

// The rare end of a wait is compiled as a call. A kernel that must not call functions defines this
// macro otherwise.
#ifndef JIN_GIVE_UP_FN
#define JIN_GIVE_UP_FN __device__ __noinline__
#endif

namespace jax_intranode {

class DeviceThread {
 public:
  // Whether this block only checks that all ranks run the same operation. The protocols don't see
  // it. It is the first one: of a grid that does not fit on the GPU the first blocks start first,
  // and the others may wait for data of another operation for ever.
  __device__ bool IsCheckBlock() const { return blockIdx.x < kCheckBlocks; }

  __device__ DeviceThread(FailureRecord* failure, uint64_t timeout_ns, int rank, uint32_t algorithm,
                          uint32_t site)
      : failure_(failure),
        timeout_ns_(timeout_ns),
        rank_(rank),
        algorithm_(algorithm),
        site_(site) {}

  __device__ int Thread() const { return threadIdx.x; }
  __device__ int Threads() const { return blockDim.x; }
  __device__ int Block() const { return blockIdx.x - kCheckBlocks; }
  __device__ int Blocks() const { return gridDim.x - kCheckBlocks; }
  __device__ void Sync() const { __syncthreads(); }
  __device__ size_t First() const { return Block() * blockDim.x + threadIdx.x; }
  __device__ size_t Stride() const { return Blocks() * blockDim.x; }

  // Only one of the waiting threads of a warp reads the clock and host memory, and only rarely.
  // Reading host memory takes longer the more threads do it. When all threads of a grid did, each
  // millisecond that one rank waited cost it another one, for which the next rank then waited, and
  // so on (2 H200s: 1 ms per operation instead of 9 us, for seconds).
  __device__ bool Wait(size_t i, int missing) {
    return Wait(i, missing, [] {});
  }
  // The same; such a thread calls `rarely()` before it reads the clock.
  template <class Rarely>
  __device__ bool Wait(size_t, int missing, Rarely&& rarely) {
    if (++polls_ % 1024 != 0 || !FirstOfActive()) return true;
    rarely();
    const uint64_t now = Nanoseconds();
    if (started_ns_ == 0) {
      started_ns_ = now;
      look_ns_ = now + kLookEveryNs;
    }
    if (now - started_ns_ > timeout_ns_) GiveUp(FailureReason::kTimeout, missing);
    if (now >= look_ns_) {
      look_ns_ = now + kLookEveryNs;
      if (*static_cast<volatile uint32_t*>(&failure_->abort) != 0) {
        GiveUp(FailureReason::kAborted, missing);
      }
      if (now - started_ns_ > kLongNs) {
        *static_cast<volatile uint64_t*>(&failure_->wait) =
            PackWait(site_, missing, now - started_ns_);
      }
    }
    return true;
  }

  // Waits are timed for each segment by itself: an operation of many may take long.
  __device__ void FenceSegment() {
    Fence();
    started_ns_ = 0;
  }

  __device__ void Enter(uint32_t* busy, uint32_t* closed) {
    if (threadIdx.x == 0) was_busy_ = ExchangeWord(busy, 1);
    closed_ = LoadWord(closed);
  }
  __device__ void Admit() { Admit(was_busy_, closed_); }
  // Gives up if another operation is in flight, or if the region is closed.
  __device__ void Admit(uint32_t busy, uint32_t closed) {
    if ((busy | closed) != 0) {
      GiveUp(closed != 0 ? FailureReason::kClosed : FailureReason::kBusy, -1);
    }
  }
  // Gives up because `peer` runs another operation, the one that the word `other` says.
  __device__ void MeetsOther(int peer, uint64_t other) {
    GiveUp(FailureReason::kOtherOperation, peer, other);
  }

 private:
  static constexpr uint64_t kLookEveryNs = 10'000'000;
  static constexpr uint64_t kLongNs = 1'000'000'000;

  __device__ static bool FirstOfActive() { return (threadIdx.x & 31) == __ffs(__activemask()) - 1; }

  __device__ static uint64_t Nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
  }

  __device__ void GiveUp(FailureReason reason, int missing, uint64_t other = 0) {
    RecordAndTrap(failure_, reason, algorithm_, rank_, missing, site_, other);
  }

  // Writes the record and traps. The context is lost, so no data leave it, and XLA raises an error.
  // Later threads give the first one time to write.
  JIN_GIVE_UP_FN static void RecordAndTrap(FailureRecord* failure, FailureReason reason,
                                           uint32_t algorithm, int rank, int missing, uint32_t site,
                                           uint64_t other) {
    if (atomicCAS(&failure->claimed, 0u, 1u) == 0) {
      failure->algorithm = algorithm;
      failure->rank = rank;
      failure->missing = missing;
      failure->site = site;
      failure->other = other;
      __threadfence_system();
      *static_cast<volatile uint32_t*>(&failure->reason) = static_cast<uint32_t>(reason);
      __threadfence_system();
    } else {
      const uint64_t start = Nanoseconds();
      while (Nanoseconds() - start < 10'000'000) {
      }
    }
    __trap();
  }

  FailureRecord* failure_;
  uint64_t timeout_ns_;
  uint64_t started_ns_ = 0;  // when the wait was first timed
  uint64_t look_ns_ = 0;     // when to read host memory next
  uint32_t polls_ = 0;
  uint32_t was_busy_ = 0;  // the block's busy word
  uint32_t closed_ = 0;    // the region's word
  int rank_;
  uint32_t algorithm_;
  uint32_t site_;
};

}  // namespace jax_intranode
