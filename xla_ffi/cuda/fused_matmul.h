// All-gather + matmul and matmul + reduce-scatter, each as one fused kernel, for Hopper GPUs. No
// XLA.
//
//   fused_order.h       the order of tiles, and the slots of chunks in rings
//   fused_layout.cuh    the kernel's registers and shared memory
//   fused_feed.cuh      the producer warp: loads operands, waits for arriving chunks
//   fused_send.cuh      the sender warps; why rings and flags are used safely
//   fused_multiply.cuh  the math warpgroups: multiply, add the peers' products, store
//   fused_kernel.cuh    the kernel: which warp does what; why it ends
//   fused_*.cu          its element types
//   fused_params.h      its parameters
//   fused_matmul.cc     its launch
//
// The grid is persistent: one block per SM, in clusters of two blocks. A block has 12 warps. Two
// math warpgroups multiply. They alternate tiles: while one multiplies a tile, the other one
// rounds, adds up and stores its last tile. (They share tiles of more than 192 columns, because the
// products of such a tile don't fit the registers of one.) One producer warp loads operands, two
// sender warps send chunks to peers or publish them, and one warp copies arriving chunks into the
// gathered operand if the caller asks for it. Data for a peer stay in the peer's ring until it has
// used them. They travel in chunks, each with a flag: operands as matrix instructions take them
// from shared memory, products as matrix instructions leave them in registers.
//
//   all-gather + matmul     At step s rank r sends its shard to rank r - s and receives that of
//                           rank r + s. In larger groups all steps proceed at the same time. A rank
//                           multiplies its own shard first, then the others in the order in which
//                           they are sent. A band may span several shards. The first columns of all
//                           its row pairs are sent before the next columns, so a band is multiplied
//                           while it arrives.
//   matmul + reduce-scatter Rank r multiplies the rows of rank r + 1 first and its own last, and
//                           sends each tile of products when it is computed. (In parts: first a
//                           part of the tiles of each peer, then the next part.) A tile of its own
//                           rows waits for the same tile of all other ranks. The products are added
//                           in rank order on their way from registers to memory. With several terms
//                           their products are added in the registers. Products for peers go to
//                           scratch, from where sender warps copy them, so multiplication goes on
//                           while links are busy. With plan.direct math warpgroups store them in
//                           the peer's ring themselves, slowly, while the other warpgroup
//                           multiplies. That saves memory traffic, hence time where operands
//                           compete for the cache, and power; but a peer that is late then delays
//                           multiplication at once. If the ring can't hold all columns, the
//                           operation takes plan.rounds launches of a range of columns each.
//
// Weight gradients. In a backward pass the input gradient is such an operation. Weight gradients
// contract the same rows, x^T dy, where one factor has been gathered in the forward pass or is
// gathered now. If links limit the operation, the kernel computes weight gradients, too, while it
// would wait: in a reduce-scatter between the products for peers and the rank's own rows, in an
// all-gather when columns of all shards have arrived.
//
// The grid, the sizes and the order of tiles may change from call to call. Launched, captured or
// replayed, the kernel does the same: all that changes between calls lies in device memory.
//
// Flux and PyTorch's _async_input_mm have persistent kernels that take tiles in the order of their
// arrival. This one also sends, so it needs no copy engine, no event and no second stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "matmul_call.h"

namespace jax_intranode {

// Bytes of scratch that a call needs.
size_t FusedScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                         const MatmulPlan& plan);

// Bytes of data that a call, or each of its rounds, needs in a ring.
size_t FusedRingBytes(Algorithm algorithm, const MatmulCall& call, int size,
                      const MatmulPlan& plan);

// Enqueues an operation; may be captured. Each round is a launch and an operation of its own, which
// begins when the last one has ended: rounds share scratch and ring. Throws CUDA's errors.
void LaunchFused(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                 const MatmulCall& call, cudaStream_t stream);

// Loads the kernels onto the current device if it can run them.
void LoadFusedKernels();

}  // namespace jax_intranode
