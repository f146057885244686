// Memory operations of the protocols: one spelling for device and host builds.
//
// Several GPUs or processes read and write a slab at the same time. Every access that may race with
// another one's goes through this file. All of them are relaxed: a packet carries its own
// "I have arrived" mark (packets.h), so within an epoch no store has to be ordered before another
// one. Epochs of one operation are divided by a fence (segments.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JIN_FN __device__ __forceinline__
#define JIN_HOST_FN __host__ __device__ __forceinline__
#define JIN_RARE_FN inline __device__ __noinline__
#define JIN_UNROLL _Pragma("unroll")
#else
#include <atomic>
#define JIN_FN inline
#define JIN_HOST_FN inline
#define JIN_RARE_FN inline
#define JIN_UNROLL
#endif

namespace jax_intranode {

// 16 bytes: what a thread moves at a time.
struct alignas(16) Pack {
  uint32_t word[4];
};

// The number of packs that hold `bytes` bytes.
JIN_HOST_FN size_t PacksOf(size_t bytes) { return (bytes + sizeof(Pack) - 1) / sizeof(Pack); }

// Four relaxed 32-bit stores at system scope. They may become visible in any order: PTX promises
// single-copy atomicity for each element of a vector access, not for the vector.
JIN_FN void StoreWords(uint32_t* to, const Pack& p) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(p.word[0]),
               "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3])
               : "memory");
#else
  for (int k = 0; k < 4; ++k) {
    std::atomic_ref<uint32_t>(to[k]).store(p.word[k], std::memory_order_relaxed);
  }
#endif
}

// Four relaxed 32-bit loads at system scope.
JIN_FN Pack LoadWords(uint32_t* from) {
  Pack p;
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
               : "l"(from)
               : "memory");
#else
  for (int k = 0; k < 4; ++k) {
    p.word[k] = std::atomic_ref<uint32_t>(from[k]).load(std::memory_order_relaxed);
  }
#endif
  return p;
}

// Two relaxed 64-bit stores at system scope, each of them single-copy atomic.
JIN_FN void StorePairs(uint64_t* to, uint64_t a, uint64_t b) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
#else
  std::atomic_ref<uint64_t>(to[0]).store(a, std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(to[1]).store(b, std::memory_order_relaxed);
#endif
}

// Two relaxed 64-bit loads at system scope.
JIN_FN void LoadPairs(uint64_t* from, uint64_t* a, uint64_t* b) {
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(*a), "=l"(*b)
               : "l"(from)
               : "memory");
#else
  *a = std::atomic_ref<uint64_t>(from[0]).load(std::memory_order_relaxed);
  *b = std::atomic_ref<uint64_t>(from[1]).load(std::memory_order_relaxed);
#endif
}

// One relaxed 32-bit word of a rank's own state.
JIN_FN uint32_t LoadWord(uint32_t* from) {
#if defined(__CUDACC__)
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
#else
  return std::atomic_ref<uint32_t>(*from).load(std::memory_order_relaxed);
#endif
}

JIN_FN void StoreWord(uint32_t* to, uint32_t v) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
#else
  std::atomic_ref<uint32_t>(*to).store(v, std::memory_order_relaxed);
#endif
}

// One relaxed 64-bit word, which is read and written whole.
JIN_FN uint64_t LoadLong(uint64_t* from) {
#if defined(__CUDACC__)
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
#else
  return std::atomic_ref<uint64_t>(*from).load(std::memory_order_relaxed);
#endif
}

JIN_FN void StoreLong(uint64_t* to, uint64_t v) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
#else
  std::atomic_ref<uint64_t>(*to).store(v, std::memory_order_relaxed);
#endif
}

JIN_FN uint32_t ExchangeWord(uint32_t* at, uint32_t v) {
#if defined(__CUDACC__)
  return atomicExch(at, v);
#else
  return std::atomic_ref<uint32_t>(*at).exchange(v, std::memory_order_relaxed);
#endif
}

// Orders what this thread has loaded and stored before what it stores next, for all ranks.
JIN_FN void Fence() {
#if defined(__CUDACC__)
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
  std::atomic_thread_fence(std::memory_order_acq_rel);
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
JIN_FN Pack LoadInput(const void* from, size_t bytes, size_t i, bool aligned) {
  const size_t offset = i * sizeof(Pack);
  const unsigned char* at = static_cast<const unsigned char*>(from) + offset;
  if (aligned && offset + sizeof(Pack) <= bytes) return *reinterpret_cast<const Pack*>(at);
  return LoadBytes(at, offset < bytes ? bytes - offset : 0);
}

// The other direction: bytes past the end are dropped.
JIN_FN void StoreOutput(void* to, size_t bytes, size_t i, bool aligned, const Pack& p) {
  const size_t offset = i * sizeof(Pack);
  unsigned char* at = static_cast<unsigned char*>(to) + offset;
  if (aligned && offset + sizeof(Pack) <= bytes) {
    *reinterpret_cast<Pack*>(at) = p;
  } else {
    StoreBytes(at, offset < bytes ? bytes - offset : 0, p);
  }
}

}  // namespace jax_intranode
