// Packets: how 16 bytes of payload travel into a peer's slab together with the news of their
// arrival, so that the receiver needs no flag, no fence and no barrier.
//
// Both encodings use one mark for "nothing here yet", a 32-bit word of all ones. A slab whose
// words are all kEmpty is therefore empty under either encoding, and any operation may lay its
// packets wherever it likes in it. The receiver arms what it has read (writes kEmpty again).
//
//   Bare     16 bytes. Every word is payload; no payload word may be all ones. Floating-point data
//            can promise that: the word is a NaN (for 16-bit types, two), for which another NaN is
//            sent. Every other bit pattern survives: signed zeros, subnormals, infinities.
//   Flagged  32 bytes. Each payload word shares a 64-bit word with a zero, and that word is stored
//            and loaded whole. The receiver looks for the mark in the 32 bits of the zero, so the
//            payload may be anything.
//
// tests/native/model/collectives_model.cc checks both, with words that arrive in any order.
#pragma once

#include "memory.h"

namespace jax_intranode {

constexpr uint32_t kEmpty = 0xFFFFFFFFu;

struct BarePackets {
  static constexpr size_t kBytes = 16;

  JIN_PACK_FN static void Put(char* slot, size_t i, const Pack& p) { StoreWords(At(slot, i), p); }

  // True when all of packet `i` has arrived. Each word is looked at: they arrive in any order.
  JIN_PACK_FN static bool TryGet(char* slot, size_t i, Pack* p) {
    *p = LoadWords(At(slot, i));
#if defined(JIN_VECTORS)
    return _mm_movemask_epi8(_mm_cmpeq_epi32(VectorOf(*p), _mm_set1_epi32(kEmpty))) == 0;
#else
    return p->word[0] != kEmpty && p->word[1] != kEmpty && p->word[2] != kEmpty &&
           p->word[3] != kEmpty;
#endif
  }

  JIN_PACK_FN static void Arm(char* slot, size_t i) {
    StoreWords(At(slot, i), Pack{{kEmpty, kEmpty, kEmpty, kEmpty}});
  }

 private:
  JIN_PACK_FN static uint32_t* At(char* slot, size_t i) {
    return reinterpret_cast<uint32_t*>(slot + i * kBytes);
  }
};

struct FlaggedPackets {
  static constexpr size_t kBytes = 32;

  JIN_PACK_FN static void Put(char* slot, size_t i, const Pack& p) {
    uint64_t* to = At(slot, i);
#if defined(JIN_VECTORS)
    StoreVector(to, _mm_unpacklo_epi32(VectorOf(p), _mm_setzero_si128()));
    StoreVector(to + 2, _mm_unpackhi_epi32(VectorOf(p), _mm_setzero_si128()));
#else
    StorePairs(to, p.word[0], p.word[1]);
    StorePairs(to + 2, p.word[2], p.word[3]);
#endif
  }

  JIN_PACK_FN static bool TryGet(char* slot, size_t i, Pack* p) {
    uint64_t* from = At(slot, i);
#if defined(JIN_VECTORS)
    const __m128 a = _mm_castsi128_ps(LoadVector(from));
    const __m128 b = _mm_castsi128_ps(LoadVector(from + 2));
    *p = PackOf(_mm_castps_si128(_mm_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0))));
    const __m128i marks = _mm_castps_si128(_mm_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
    return _mm_movemask_epi8(_mm_cmpeq_epi32(marks, _mm_setzero_si128())) == 0xFFFF;
#else
    uint64_t w[4];
    LoadPairs(from, w);
    LoadPairs(from + 2, w + 2);
    bool arrived = true;
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) {
      arrived = arrived && (w[k] >> 32) == 0;
      p->word[k] = static_cast<uint32_t>(w[k]);
    }
    return arrived;
#endif
  }

  JIN_PACK_FN static void Arm(char* slot, size_t i) {
    uint64_t* to = At(slot, i);
#if defined(JIN_VECTORS)
    StoreVector(to, _mm_set1_epi32(kEmpty));
    StoreVector(to + 2, _mm_set1_epi32(kEmpty));
#else
    StorePairs(to, ~uint64_t{0}, ~uint64_t{0});
    StorePairs(to + 2, ~uint64_t{0}, ~uint64_t{0});
#endif
  }

 private:
  JIN_PACK_FN static uint64_t* At(char* slot, size_t i) {
    return reinterpret_cast<uint64_t*>(slot + i * kBytes);
  }
};

}  // namespace jax_intranode
