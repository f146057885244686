// Permutes, for tests of the protocols and of the CPU groups.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "xla_ffi/kernels/permute.h"

namespace jax_intranode {

// The source of each rank, or -1: it gets the operand of another rank, its own, or none's.
using Permutation = std::vector<int>;

inline Permutation RandomPermutation(int ranks, std::mt19937* random) {
  Permutation sources(ranks);
  for (int r = 0; r < ranks; ++r) sources[r] = r;
  std::shuffle(sources.begin(), sources.end(), *random);
  const uint32_t missing = (*random)() % 4;
  for (int& source : sources) source = (*random)() % 4 < missing ? -1 : source;
  return sources;
}

// Adds a member of a permute, as a rank sees it.
inline void AddMember(Permutes* members, const Buffer& buffer, const Permutation& sources,
                      int rank) {
  const auto to = std::find(sources.begin(), sources.end(), rank);
  members->Append(buffer, sources[rank],
                  to == sources.end() ? -1 : static_cast<int>(to - sources.begin()));
}

}  // namespace jax_intranode
