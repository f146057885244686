// All-gather + matmul and matmul + reduce-scatter as one kernel, for Hopper GPUs. No XLA.
//
// The grid is persistent: a block a multiprocessor. Of a block's warps eight multiply, in two
// warpgroups that take turns: while one multiplies a tile, the other rounds, sums and stores its
// last one. (Tiles of more than 192 columns they multiply together, for one has no room for the
// products.) One warp feeds them, two send to peers, or tell them, and one copies what arrives
// where a gathered operand is asked for. What is sent lies in the receiver's ring until it has been
// used. (Not in XLA's own buffers: those move when XLA captures again on one rank alone.) All that
// travels are items, with a flag each: 64 columns of 128 rows, operands as the matrix instructions
// want them in shared memory, products as these leave them in registers.
//
//   all-gather + matmul     at step s rank r sends its shard to rank r - s, and gets that of rank
//                           r + s; among many all steps are under way at once. A rank multiplies
//                           its own shard, then the others, in the order in which they are sent: of
//                           a group of row tiles, which may be of several shards, the first columns
//                           of all, then the next ones. So all of a group's tiles are under way
//                           while it arrives. (With derivatives beside it: see below.)
//   matmul + reduce-scatter rank r multiplies the rows of rank r + 1 first, its own last, and sends
//                           each tile of the product when it is done; or a part of the tiles for
//                           each peer before the next part. A tile of its own rows waits for the
//                           same tile of all other ranks and is summed with them, in rank order, on
//                           its way from the registers to memory. A product may itself be a sum
//                           of several, which add up in the registers. Those for peers are stored
//                           in scratch, and copied from there by the warps that send, so that
//                           multiplying goes on when the link can't take them. Or, where the matmul
//                           decides, a warpgroup stores them in the owner's ring itself (`direct`),
//                           slowly, while the other one multiplies: less goes through the cache and
//                           nothing to memory, which is time where operands wait for the cache,
//                           power, and scratch; but it waits at once for a peer that is late. Sums
//                           of which the ring has no room for all columns take several launches, of
//                           some columns each.
//
// In a backward pass the derivative by x is such an operation, and those by matrices are products
// of the same rows that a rank has to itself: x^T dy, of what was gathered in the forward pass or
// is gathered now. Where the links decide, the kernel multiplies them, too ("beside"), while it
// would wait: of a sum between what is sent and its own rows, of an all-gather when columns of what
// all ranks send have arrived. An item has 64 columns in 128 bytes of a row, in two halves of 64
// rows: as the matrix instructions want it also where rows are contracted.
//
// Why nothing is written before what lay in its place has been read
//   A rank lends its ring to each peer when its kernel begins, so when all that used the ring
//   before has ended; a sender writes only after that. The word carries the number of the
//   operation in the group, which grows alike on all ranks, so that it is taken once. (A warp that
//   sends looks for it, or a warpgroup that stores and the warp that tells, each while something
//   that it has to do there is not done.)
//   A rank's kernel ends when all that was meant for it has arrived and has been used, and when all
//   that it sends has been written. Hence a peer that is an operation ahead, and overwrites the
//   word with its next one, has got all that the word stood for: no block that still runs needs it.
//
// Why a flag that is set means that the data of this operation lie there
//   The word carries the number of the receiver's operation on that ring, too, which all groups of
//   the device share and which is different for each. The sender writes this number into the flag,
//   after the data and a fence at system scope, which may stand for two items. What a warpgroup has
//   stored directly a warp tells of that has seen its count of tiles: the warpgroup meets, one
//   thread releases the count, the warp acquires it, and a fence comes after all that its thread
//   knows to have been written, whoever wrote it. (Without the fence flags overtake: sums were
//   wrong on 2 H200s, even with bulk copies that had completed.) Flags have words of their own,
//   which hold nothing else, ever: what a flag held before is the number of an operation that has
//   ended. Nobody clears them.
//
// Why it ends
//   A warp that sends waits for a peer's ring, which the peer lends when the first of its blocks
//   begins, for its own block's products, and for its cluster's next list, which is drawn before
//   the last unit of the one before has been multiplied; and it tells of all that it has sent
//   before it waits for the first two (and soon after it has the list). Where what is sent to one
//   peer lies between what others get, these wait for a peer that is late, too, until it begins,
//   for which it needs none of them. What multiplies waits for a peer's ring, where it stores
//   there, and for its turn. And it waits for flags: in an all-gather, be it for a product or for a
//   derivative, for what all ranks send without waiting for a product, whatever comes in between;
//   in a reduce-scatter (where derivatives wait for nothing) for tiles of which each cluster
//   computes all that are left before it waits for any. So no wait depends on itself. (A warpgroup
//   that waits for peers had its turn after all those tiles, whoever multiplied them.) Nor does it
//   depend on blocks that do not run yet: what peers wait for is not dealt out, but drawn, a list
//   of units or an item at a time, by the blocks that run. They finish it, however many they are.
//   Were it dealt out, a collective of another stream could hold multiprocessors of one rank, where
//   blocks of this kernel wait for them, while this kernel holds all of another rank, where the
//   collective waits for them: neither would end. Ranks that call one operation wait for those that
//   have not come to it, until the deadline.
//
// The grid, the sizes and the order of tiles may differ from call to call. Replayed, captured or
// launched, the kernel does the same: all that changes from call to call lies in device memory.
//
// After the persistent kernels of Flux and of PyTorch's _async_input_mm (tiles in the order of
// their arrival), but with the sending inside, so that no copy engine, event or second stream is
// needed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "fused_order.h"
#include "matmul_call.h"

namespace jax_intranode {

// What a call takes of scratch.
size_t FusedScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                         const MatmulPlan& plan);

// What a call takes of a ring, or each of its rounds.
size_t FusedRingBytes(Algorithm algorithm, const MatmulCall& call, int size,
                      const MatmulPlan& plan);

// Enqueues an operation, which may be captured: a launch for each round, which is an operation of
// its own, with numbers of its own. The next one begins when it has ended: they share scratch and
// ring. Throws what CUDA refuses.
void LaunchFused(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                 const MatmulCall& call, cudaStream_t stream);

// Loads the kernels of this file onto the current device, if they are for it.
void LoadFusedKernels();

}  // namespace jax_intranode
