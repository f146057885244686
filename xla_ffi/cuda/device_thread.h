// The thread context of group.h on a GPU: a public one that knows its operation.
#pragma once

#include "../kernels/same_operation.h"
#include "collectives.h"
#include "failure.h"

namespace jax_intranode {

class DeviceThread : public v1::WaitingThread<DeviceThread> {
 public:
  // Whether this block only checks that all ranks run the same operation. The protocols don't see
  // it. It is the first one: of a grid that does not fit on the GPU the first blocks start first,
  // and the others may wait for data of another operation for ever.
  __device__ bool IsCheckBlock() const { return blockIdx.x < kCheckBlocks; }

  __device__ DeviceThread(const DeviceGroup& group, Algorithm algorithm)
      : WaitingThread(group.failure, group.timeout_ns, group.site),
        algorithm_(algorithm),
        type_(group.type) {}

  __device__ ElementType type() const { return type_; }
  __device__ int Block() const { return blockIdx.x - kCheckBlocks; }
  __device__ int Blocks() const { return gridDim.x - kCheckBlocks; }
  __device__ size_t First() const { return Block() * blockDim.x + threadIdx.x; }
  __device__ size_t Stride() const { return Blocks() * blockDim.x; }

  __device__ int FirstUpdate() const { return threadIdx.x; }

  using WaitingThread::Wait;
  __device__ bool Wait(size_t, int missing) { return Wait(missing); }

  // Waits are timed for each segment by itself: an operation of many may take long.
  __device__ void FenceSegment() {
    Fence();
    Arrived();
  }

  __device__ void Enter(uint32_t* busy, uint32_t* closed) {
    if (threadIdx.x == 0) was_busy_ = Exchange(busy, 1);
    closed_ = Load(closed);
  }
  using WaitingThread::Admit;
  __device__ void Admit() { Admit(was_busy_, closed_); }
  // Gives up because `peer` runs another operation, the one that the word `other` says.
  __device__ void MeetsOther(int peer, uint64_t other) {
    GiveUp(static_cast<uint32_t>(FailureReason::kOtherOperation), peer, other);
  }
  // Gives up because of a bad update of a ragged all-to-all.
  __device__ void Refuse(const UpdateFault& fault) {
    Trap(static_cast<uint32_t>(FailureReason::kBadUpdate), -1,
         [&fault, algorithm = algorithm_](v1::PeerRecord* record) {
           auto* const failure = static_cast<FailureRecord*>(record);
           failure->algorithm = static_cast<uint32_t>(algorithm);
           failure->fault = fault;
         });
  }
  __device__ void GiveUp(uint32_t reason, int missing, uint64_t other = 0) {
    Trap(reason, missing, [algorithm = algorithm_, other](v1::PeerRecord* record) {
      auto* const failure = static_cast<FailureRecord*>(record);
      failure->algorithm = static_cast<uint32_t>(algorithm);
      failure->other = other;
    });
  }

 private:
  uint32_t was_busy_ = 0;  // the block's busy word
  uint32_t closed_ = 0;    // the region's word
  Algorithm algorithm_;
  ElementType type_;
};

}  // namespace jax_intranode
