// The kernel of an algorithm, for tests of the protocols.
#pragma once

#include <type_traits>

#include "xla_ffi/kernels/algorithms.h"
#include "xla_ffi/kernels/hybrid_cube_mesh.h"
#include "xla_ffi/kernels/one_hop.h"
#include "xla_ffi/kernels/two_shot.h"
#include "xla_ffi/kernels/types.h"

namespace jax_intranode {

// The collectives that run on one group. All are kernels of the CPU backend, too.
constexpr Algorithm kCollectives[] = {Algorithm::kOneShot, Algorithm::kTwoShot,
                                      Algorithm::kReduceScatter, Algorithm::kAllGather,
                                      Algorithm::kAllToAll};

// A hybrid cube mesh: quads of the even and of the odd ranks; an even rank's relay is the next one.
inline Links LinksOf(int rank, int ranks) {
  Links links{0, rank ^ 1};
  for (int r = 0; r < ranks; ++r) {
    if (r != rank && (r % 2 == rank % 2 || r == links.relay)) links.peers |= 1u << r;
  }
  return links;
}

// Calls `run` with the type of a psum's kernel, as a std::type_identity.
template <class Type, int N, class Packets, class Run>
auto WithAllReduce(Algorithm algorithm, Run run) {
  if (algorithm == Algorithm::kTwoShot) return run(std::type_identity<TwoShot<Type, N, Packets>>());
  return run(std::type_identity<OneShot<Type, N, Packets>>());
}

// The same for all collectives.
template <class Type, int N, class Packets, class Run>
auto WithKernel(Algorithm algorithm, Run run) {
  switch (algorithm) {
    case Algorithm::kReduceScatter:
      return run(std::type_identity<ReduceScatter<Type, N, Packets>>());
    case Algorithm::kAllGather:
      return run(std::type_identity<AllGather<Type, N, Packets>>());
    case Algorithm::kAllToAll:
      return run(std::type_identity<AllToAll<Type, N, Packets>>());
    default:
      return WithAllReduce<Type, N, Packets>(algorithm, run);
  }
}

}  // namespace jax_intranode
