// All-gather + matmul and matmul + reduce-scatter, the one hidden behind the other: a pipeline of
// copies and cuBLASLt's matmuls. No XLA.
//
// A rank's rows travel in pieces. Copy engines push them, on a stream of their own, into a ring of
// slots that the receiver has beside its slab: they leave the multiprocessors to the matmuls. A
// ring, because a shard may be larger than any slab; and not XLA's own buffers, because a copy
// engine takes its addresses from the host when it is enqueued, or captured, and a peer's buffers
// move when XLA captures again on that peer alone. One copy runs after another: two streams of them
// are served by one engine, in an order of its own.
//
//   all-gather + matmul     at step s rank r sends its shard to rank r - s, and gets that of rank
//                           r + s: each link carries one shard at a time. A rank multiplies its own
//                           shard first, then each piece as it arrives. The last pieces are small
//                           where nothing else is left to do while they travel.
//   matmul + reduce-scatter rank r multiplies the rows of rank r + 1 first, its own last, and sends
//                           each product as it is done; the first pieces are small where the links
//                           have waited for them. The owner sums all ranks' products in rank order
//                           when the last ones have come. Products that do not fit the ring come in
//                           rounds.
//
// Why no slot is written before it has been read, and no signal (signals.h) set before it was reset
//   A rank grants a slot to one sender for one piece (for sums: its share of the ring for a round).
//   It grants the first ones when its stream has come to the operation, so after all that used the
//   ring before; and again when what lies there has been multiplied and copied, or summed. A sender
//   writes only what it was granted.
//   An operation ends on a rank when all pieces for it have arrived and all that it sends are sent,
//   so when all that it granted has been used and all its own signals have been reset. The grant of
//   a peer that is already in the next operation finds its word reset: the peer's last operation
//   ended, so all grants that it gave in it had been used by then.
//   Hence the group, the shapes and the order of pieces may differ from call to call, and groups of
//   one device can share its ring, as long as its operations run one after another (`busy`).
//
// Why it ends, in whatever order the GPU takes what may run at once (a graph's branches can share
// one queue, in which a kernel that waits holds up what comes behind)
//   What waits for a peer's piece or grant comes after all that this rank has for its peers before:
//   the wait for arrival q is enqueued, and depends, on this rank's own push q; the wait for a
//   grant on the grants that this rank gave before. So the first wait, in the order of pieces, that
//   has not ended anywhere is one whose answer no other wait holds up.
//
// After PyTorch's _fused_all_gather_matmul and xformers' sequence_parallel_fused_ops (own part
// first or last, rotated order, copy engines), but with signals of constant values, and on one
// stream of matmuls: of two that run at once both products are late.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "cublas_lt.h"
#include "matmul_call.h"

namespace jax_intranode {

// A device's streams beside XLA's own, and an event of each. Created once, never destroyed.
struct SideStreams {
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
  };
  Lane main;   // of a call's own stream, which multiplies, only the event is kept
  Lane copy;   // pushes to peers
  Lane gate;   // tells peers, waits for them
  Lane local;  // copies what has arrived, or sums it
  cudaEvent_t sent[kMaxSlots], arrived[kMaxSlots];  // by number of the piece
  std::mutex mutex;                                 // an operation is enqueued as a whole

  static SideStreams& Of(int device);
};

// Scratch of any call; a sum's products come on top.
constexpr size_t kScratchAlignment = 256;
constexpr size_t kScratchBytes = kMatmulWorkspaceBytes + kScratchAlignment;
size_t ScratchBytes(Algorithm algorithm, const MatmulCall& call, int size, const MatmulPlan& plan);

// The matmuls of a call site on one device: by this pipeline, or by one kernel if the plan says so.
class MatmulSite {
 public:
  MatmulSite(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan);

  // Chooses algorithms for all matmuls of the call, of which only the shapes count.
  void Prepare(const MatmulCall& call) const;
  // Enqueues the operation after what is on the stream, which goes on when it is done.
  void Enqueue(const MatmulCall& call, cudaStream_t stream);

 private:
  struct Piece;
  class Enqueuer;

  // The shard in equal pieces of at most so many rows.
  std::vector<Piece> Equal(const MatmulCall& call, int64_t most) const;
  // A piece in halves, and the second of them again, and so on.
  std::vector<Piece> Halved(const Piece& piece, int cuts) const;
  // All-gather: what arrives at a step. Reduce-scatter: the rounds, and what is sent at a step.
  std::vector<Piece> Arriving(const MatmulCall& call, int step) const;
  std::vector<Piece> Rounds(const MatmulCall& call) const;
  std::vector<Piece> Sent(const Piece& whole, bool first_round, int step) const;

  MatmulShape ShapeOf(const MatmulCall& call, size_t k, const Piece& piece) const;

  const MatmulMember& member_;
  const Algorithm algorithm_;
  const MatmulPlan plan_;
};

}  // namespace jax_intranode
