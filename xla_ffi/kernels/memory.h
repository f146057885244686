// Memory operations of the protocols: one spelling for device and host builds.
//
// Several GPUs or processes read and write a slab at the same time. Every access that may race with
// another one's goes through this file or through the public header that it includes, which users'
// kernels stand on, too. All of those in packets are relaxed: a packet carries its own
// "I have arrived" mark (packets.h), so within an epoch no store has to be ordered before another
// one. Epochs of one operation are divided by a fence (segments.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../../jax_intranode/include/jax_intranode/device.h"

// x86 CPUs load and store packets as vectors of 16 bytes. The models and the thread sanitizer,
// which follow each atomic access, are compiled without.
#if defined(__SSE2__) && !defined(__CUDACC__) && !defined(JAX_INTRANODE_NO_VECTORS)
#define JIN_VECTORS
#include <emmintrin.h>
#endif

#define JIN_FN JAX_INTRANODE_FN
#define JIN_HOST_FN JAX_INTRANODE_HOST_FN
// JIN_PACK_FN: what runs for each pack. With -O2 a CPU compiler would call such functions, which
// takes longer than what they do.
#if defined(__CUDACC__)
#define JIN_PACK_FN JAX_INTRANODE_FN
#define JIN_RARE_FN inline __device__ __noinline__
#define JIN_UNROLL _Pragma("unroll")
#else
#define JIN_PACK_FN inline __attribute__((always_inline))
#define JIN_RARE_FN inline __attribute__((noinline))
#define JIN_UNROLL
#endif

namespace jax_intranode {

using v1::Exchange;
using v1::Fence;
using v1::Load;
using v1::LoadAcquire;
using v1::LoadPair;
using v1::LoadPairs;
using v1::Store;
using v1::StorePair;
using v1::StorePairs;

// 16 bytes: what a thread moves at a time.
struct alignas(16) Pack {
  uint32_t word[4];
};

#if defined(JIN_VECTORS)
JIN_PACK_FN __m128i VectorOf(const Pack& p) {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(&p));
}
JIN_PACK_FN Pack PackOf(__m128i v) {
  Pack p;
  _mm_store_si128(reinterpret_cast<__m128i*>(&p), v);
  return p;
}
// Aligned, so each of the four words is whole, as in the access of a GPU below.
JIN_PACK_FN void StoreVector(void* to, __m128i v) { *static_cast<volatile __m128i*>(to) = v; }
JIN_PACK_FN __m128i LoadVector(void* from) { return *static_cast<volatile __m128i*>(from); }
#endif

// The number of packs that hold `bytes` bytes.
JIN_HOST_FN size_t PacksOf(size_t bytes) { return (bytes + sizeof(Pack) - 1) / sizeof(Pack); }

// Four relaxed 32-bit stores at system scope. They may become visible in any order: PTX promises
// single-copy atomicity for each element of a vector access, not for the vector.
JIN_PACK_FN void StoreWords(uint32_t* to, const Pack& p) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(p.word[0]),
               "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3])
               : "memory");
#elif defined(JIN_VECTORS)
  StoreVector(to, VectorOf(p));
#else
  for (int k = 0; k < 4; ++k) {
    std::atomic_ref<uint32_t>(to[k]).store(p.word[k], std::memory_order_relaxed);
  }
#endif
}

// Four relaxed 32-bit loads at system scope.
JIN_PACK_FN Pack LoadWords(uint32_t* from) {
  Pack p;
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
               : "l"(from)
               : "memory");
#elif defined(JIN_VECTORS)
  p = PackOf(LoadVector(from));
#else
  for (int k = 0; k < 4; ++k) {
    p.word[k] = std::atomic_ref<uint32_t>(from[k]).load(std::memory_order_relaxed);
  }
#endif
  return p;
}

// Has the compiler compute an address here, and not where it is used.
JIN_FN void Keep(char*& at) {
#if defined(__CUDACC__)
  asm volatile("" : "+l"(at));
#endif
}

// Asks for the cache line at an address that is read soon.
JIN_FN void Prefetch(const void* at) {
#if defined(__CUDACC__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#else
  __builtin_prefetch(at);
#endif
}

// Byte by byte, for the last pack and for buffers that are not aligned.
JIN_RARE_FN Pack LoadBytes(const unsigned char* from, size_t count) {
  Pack p = {};
  JIN_UNROLL
  for (size_t k = 0; k < 16; ++k) {
    if (k < count) p.word[k / 4] |= static_cast<uint32_t>(from[k]) << (8 * (k % 4));
  }
  return p;
}

JIN_RARE_FN void StoreBytes(unsigned char* to, size_t count, Pack p) {
  JIN_UNROLL
  for (size_t k = 0; k < 16; ++k) {
    if (k < count) to[k] = static_cast<unsigned char>(p.word[k / 4] >> (8 * (k % 4)));
  }
}

// Pack `i` of an ordinary buffer of `bytes` bytes; what lies past its end reads as zero. Any
// alignment; `aligned` says that `from` is a multiple of 16.
JIN_PACK_FN Pack LoadInput(const void* from, size_t bytes, size_t i, bool aligned) {
  const size_t offset = i * sizeof(Pack);
  const unsigned char* at = static_cast<const unsigned char*>(from) + offset;
  if (aligned && offset + sizeof(Pack) <= bytes) return *reinterpret_cast<const Pack*>(at);
  return LoadBytes(at, offset < bytes ? bytes - offset : 0);
}

// The other direction: bytes past the end are dropped.
JIN_PACK_FN void StoreOutput(void* to, size_t bytes, size_t i, bool aligned, const Pack& p) {
  const size_t offset = i * sizeof(Pack);
  unsigned char* at = static_cast<unsigned char*>(to) + offset;
  if (aligned && offset + sizeof(Pack) <= bytes) {
    *reinterpret_cast<Pack*>(at) = p;
  } else {
    StoreBytes(at, offset < bytes ? bytes - offset : 0, p);
  }
}

}  // namespace jax_intranode
