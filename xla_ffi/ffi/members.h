// Groups as Python passes them, checked before any kernel gets them.
#pragma once

#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/group.h"
#include "../kernels/hybrid_cube_mesh.h"
#include "../text.h"
#include "registry.h"

namespace jax_intranode {

// What a device of this process has to do with a partition.
struct GroupMember {
  int64_t device;                    // as handlers know it
  int64_t group;                     // the index of its group
  int rank;                          // its rank there
  std::vector<uintptr_t> addresses;  // of every rank's memory
  uintptr_t record;                  // on GPUs: of its failure record
};

inline std::vector<int64_t> DeviceIdsOf(const Partition& partition, int64_t group) {
  const auto& [ids, size, permutes] = partition;
  return {ids.begin() + group * size, ids.begin() + (group + 1) * size};
}

// The addresses of the ranks' memory.
inline void CopyAddresses(const GroupMember& member, int64_t size, char* (&to)[kMaxRanks]) {
  if (size < 1 || size > kMaxRanks || member.addresses.size() != static_cast<size_t>(size) ||
      member.rank < 0 || member.rank >= size) {
    throw InvalidArgument("rank ", member.rank, " of a group of ", size, " ranks with ",
                          member.addresses.size(), " addresses");
  }
  for (int64_t r = 0; r < size; ++r) to[r] = reinterpret_cast<char*>(member.addresses[r]);
}

inline Group GroupOf(const GroupMember& member, int64_t size, size_t epoch_buffer_bytes) {
  Group group{};
  CopyAddresses(member, size, group.region);
  group.epoch_buffer_bytes = epoch_buffer_bytes;
  group.rank = member.rank;
  group.size = static_cast<int>(size);
  return group;
}

// For each rank of a group: the ranks that it is linked to, as bits, and its relay.
using LinksOfGroup = std::vector<std::tuple<uint32_t, int>>;

// Whether ranks are two halves: in each half all are linked to each other, and each rank is linked
// to one rank of the other half, its relay, whose relay it is.
inline bool IsCubeMesh(const std::vector<Links>& links) {
  const int n = static_cast<int>(links.size());
  if (n == 0 || n % 2 != 0 || n > kMaxRanks) return false;
  for (int r = 0; r < n; ++r) {
    const auto [peers, relay] = links[r];
    if (relay < 0 || relay >= n || relay == r || peers >> n != 0) return false;
    if (!links[r].Has(relay) || links[r].Has(r)) return false;
    if (std::popcount(peers) != n / 2 || links[relay].relay != r) return false;
  }
  const auto quad = [&](int r) { return (links[r].peers & ~(1u << links[r].relay)) | 1u << r; };
  for (int r = 0; r < n; ++r) {
    if ((quad(r) >> links[r].relay & 1) != 0) return false;
    for (int p = 0; p < n; ++p) {
      if ((quad(r) >> p & 1) != 0 ? quad(p) != quad(r) : (quad(p) & quad(r)) != 0) return false;
    }
  }
  return true;
}

// The links of a rank; none if all ranks of its group are linked to each other.
inline Links LinksOf(const std::vector<LinksOfGroup>& of_groups, const GroupMember& member,
                     int64_t size) {
  if (of_groups.empty()) return {};
  std::vector<Links> links;
  for (const auto& [peers, relay] : of_groups.at(member.group)) links.push_back({peers, relay});
  // GPUs have kernels for 8 ranks only.
  if (links.size() != static_cast<size_t>(size) || size != kMaxRanks || !IsCubeMesh(links)) {
    throw InvalidArgument("the links of group ", member.group, " are no hybrid cube mesh");
  }
  return links[member.rank];
}

}  // namespace jax_intranode
