#pragma once

#include "atomics.h"
//
#include "xla_ffi/kernels/packets.h"

namespace jax_intranode {

// Packets with half of the payload, for searches that are large otherwise: two words are enough to
// arrive in parts.
struct HalfPackets {
  static constexpr size_t kBytes = 8;
  static void Put(char* slot, size_t i, const Pack& p) {
    for (int k = 0; k < 2; ++k) Store(At(slot, i) + k, p.word[k]);
  }
  static bool TryGet(char* slot, size_t i, Pack* p) {
    *p = {};
    for (int k = 0; k < 2; ++k) p->word[k] = Load(At(slot, i) + k);
    return p->word[0] != kEmpty && p->word[1] != kEmpty;
  }
  static void Arm(char* slot, size_t i) {
    for (int k = 0; k < 2; ++k) Store(At(slot, i) + k, kEmpty);
  }
  static uint32_t* At(char* slot, size_t i) {
    return reinterpret_cast<uint32_t*>(slot + i * kBytes);
  }
};

}  // namespace jax_intranode
