// All-gather + matmul and matmul + reduce-scatter as a pipeline of copy engines and cuBLASLt's
// matmuls. No XLA.
//
// A rank's rows travel in pieces. Copy engines push them, on a stream of their own, into slots of
// the receiver's ring; so all SMs are left to the matmuls. A ring is needed because a shard may be
// larger than any slab. XLA's own buffers can't be used: a copy engine gets its addresses from the
// host when the copy is enqueued or captured, and a peer's buffers move when XLA captures again on
// that peer only. Copies run one after another: one engine serves two streams of copies in an order
// of its own.
//
//   all-gather + matmul     At step s rank r sends its shard to rank r - s and receives that of
//                           rank r + s, so each link carries one shard at a time. A rank multiplies
//                           its own shard first, then each piece as it arrives. The last pieces are
//                           small, because nothing else is left to do while they travel.
//   matmul + reduce-scatter Rank r multiplies the rows of rank r + 1 first and its own last, and
//                           sends each product as soon as it is computed. The first pieces are
//                           small, because the links wait for them. The owner adds all ranks'
//                           products in rank order when the last ones have arrived. Products that
//                           don't fit the ring come in rounds.
//
// Why no slot is written before it has been read, and no signal (signals.h) set before it was reset
//   A rank grants a slot to one sender for one piece; in a reduce-scatter, a share of the ring for
//   one round. It makes the first grants when its stream has come to the operation, hence after all
//   earlier users of the ring. It grants a slot again when the slot's content has been multiplied
//   and copied, or added. A sender only writes what it was granted.
//   An operation ends on a rank when all pieces for this rank have arrived and all pieces that it
//   sends have been sent. By then everything that it granted has been used, and all its own signals
//   have been reset. So a peer that is already in its next operation, and grants again, finds the
//   word reset: its last operation has ended, so its grants of that operation had been used.
//   Hence the group, the shapes and the order of pieces may change from call to call, and the
//   groups of a device can share its ring, as long as their operations run one after another
//   (`busy`).
//
// Why it ends, in whatever order the GPU runs what is ready (branches of a graph may share a queue,
// in which a kernel that waits delays those behind it)
//   A wait for a peer's piece or grant comes after everything that this rank owes its peers until
//   then. The wait for arrival q is enqueued after this rank's own push q and the signal of it, and
//   depends on them. The wait for a grant depends on the grants that this rank made before, and on
//   the signals of its earlier pushes. So the first wait, in the order of pieces, that has not
//   ended on any rank is one whose answer no other wait delays.
//
// tests/native/pipeline_test.cc runs the code that enqueues operations in many random orders.
//
// PyTorch's _fused_all_gather_matmul and xformers' sequence_parallel_fused_ops work alike: the own
// part first or last, a rotated order, copy engines. Here signals have constant values, and matmuls
// run on one stream: two matmuls that run at the same time both finish late.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cublas_lt.h"
#include "matmul_call.h"

namespace jax_intranode {

// Creates the streams and events that the pipeline uses on a device, once. They are never
// destroyed.
void CreateSideStreams(int device);

// Bytes of scratch of any call. A reduce-scatter's products come on top.
constexpr size_t kPipelineScratchBytes = kMatmulWorkspaceBytes + kScratchAlignment;
size_t PipelineScratchBytes(Algorithm algorithm, const MatmulCall& call, int size);

// Chooses cuBLASLt's algorithms for all matmuls of a call. Only the call's shapes matter.
void PreparePipeline(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                     const MatmulCall& call);

// Enqueues an operation; may be captured. It begins after what is on the stream, which goes on when
// the operation has ended. Throws CUDA's errors.
void EnqueuePipeline(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                     const MatmulCall& call, cudaStream_t stream);

}  // namespace jax_intranode
