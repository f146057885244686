// Hopper's asynchronous copies, barriers and matrix instructions, one function each, for device
// code of sm_90a. The PTX manual explains them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../kernels/memory.h"

namespace jax_intranode::hopper {

JIN_FN uint32_t SharedAddress(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// True for one thread of a warp, all of whose threads must call it. The compiler then knows that
// only one thread runs what follows.
JIN_FN bool Elected() {
  uint32_t chosen;
  asm volatile(
      "{.reg .pred p; elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(chosen));
  return chosen != 0;
}

// Clusters.

JIN_FN uint32_t RankInCluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Called by all threads of the cluster.
JIN_FN void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The cluster-wide address of the same shared-memory location in one of its blocks.
JIN_FN uint32_t ClusterAddress(uint32_t at, uint32_t of_rank) {
  uint32_t of_cluster;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(of_cluster) : "r"(at), "r"(of_rank));
  return of_cluster;
}

// Writes a word at the same location in a block of the cluster.
JIN_FN void StoreToCluster(uint32_t at, uint32_t of_rank, uint32_t v) {
  asm volatile(
      "st.relaxed.cluster.shared::cluster.u32 [%0], %1;" ::"r"(ClusterAddress(at, of_rank)), "r"(v)
      : "memory");
}

// Barriers in shared memory, given by their addresses.

JIN_FN void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

JIN_FN void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
JIN_FN void ClusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Makes initialised barriers visible to the cluster. Called before the cluster synchronises.
JIN_FN void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and lets the phase end only after `bytes` more bytes have been copied.
JIN_FN void BarrierExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the barrier of a block of the cluster, given by its ClusterAddress.
JIN_FN void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

JIN_FN bool BarrierTryWait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

JIN_FN void BarrierWait(uint32_t barrier, uint32_t parity) {
  while (!BarrierTryWait(barrier, parity)) {
  }
}

// Bulk copies. The stores that a thread issues between two commits form a bulk group.

// Orders ordinary accesses before bulk copies: accesses to any memory, or to shared memory.
JIN_FN void ProxyFence() { asm volatile("fence.proxy.async;" ::: "memory"); }
JIN_FN void SharedProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

JIN_FN void Load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

JIN_FN void Load(uint32_t to, const CUtensorMap& map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Loads into the same location in both blocks of a cluster, and signals the barriers of both.
JIN_FN void LoadToBoth(uint32_t to, const CUtensorMap& map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

JIN_FN void LoadToBoth(uint32_t to, const CUtensorMap& map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}
JIN_FN void LoadToBoth(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

JIN_FN void Store(const CUtensorMap& map, int x, int y, int z, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(from)
      : "memory");
}

JIN_FN void StoreCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most N bulk groups have not been written.
template <int N>
JIN_FN void StoreWait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Waits until at most N bulk groups have not been read.
template <int N>
JIN_FN void StoreWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Changes the number of registers per thread. All warps of a warpgroup call it.
template <int N>
JIN_FN void KeepRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
JIN_FN void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Synchronises kThreads threads at a barrier. Barrier 0 is the one of __syncthreads.
template <int kBarrier, int kThreads>
JIN_FN void NamedSync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Arrives at such a barrier without waiting.
template <int kBarrier, int kThreads>
JIN_FN void NamedArrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// A warp stores four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of
// matrix l / 8. Its word i holds two elements of row l / 4 of matrix i.
JIN_FN void StoreMatrices(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Kernels that are launched before the one ahead of them has ended.

// Lets the next kernel start, once all blocks have called it or ended.
JIN_FN void LetNextKernelStart() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the kernel ahead has ended and what it wrote is visible.
JIN_FN void AwaitKernelAhead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Matrix instructions.

// The lower half of a matrix descriptor: a tile in shared memory with rows of 128 bytes, swizzled
// by 128 bytes, at a multiple of 1024. If the rows run along M or N, one block of 64 elements of M
// or N lies 8 KB (64 rows) after the other.
JIN_FN uint32_t TileDescriptor(uint32_t address) {
  constexpr uint32_t kLeading = 64 * 128;
  return kLeading >> 4 << 16 | (address & 0x3FFFF) >> 4;
}
// What to add to a descriptor to move it by `bytes`.
JIN_FN constexpr uint32_t DescriptorOffset(uint32_t bytes) { return bytes >> 4; }

JIN_FN void MatmulFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JIN_FN void MatmulCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
JIN_FN void MatmulWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Called after a wait, so that the compiler does not use the products before it.
template <int kRegisters>
JIN_FN void MatmulDone(float (&d)[kRegisters]) {
  JIN_UNROLL
  for (float& value : d) asm volatile("" : "+f"(value)::"memory");
}

// d += a b, with a [64, 16] and b [16, 2 * kRegisters] in shared memory and d in the registers of a
// warpgroup. An operand is K-major, or M-major or N-major if the flag says so.
template <bool kBf16, bool kMMajorA, bool kNMajorB, int kRegisters>
JIN_FN void Matmul16(float (&d)[kRegisters], uint32_t a, uint32_t b);

// Completes the descriptors a and b. Their upper half says: swizzled by 128 bytes, 1024 bytes from
// one group of 8 rows to the next.
#define JIN_DESCRIPTORS(of_a, of_b) \
  "{.reg .b64 a, b;\n"              \
  "mov.b64 a, {" of_a               \
  ", 0x40000040};\n"                \
  "mov.b64 b, {" of_b ", 0x40000040};\n"

// Lists of d's registers, and of their names in the instruction: 64, then 32, 16 and 16 more.
#define JIN_D8(i)                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JIN_D16(i) JIN_D8(i), JIN_D8(i + 8)
#define JIN_D32(i) JIN_D16(i), JIN_D16(i + 16)
#define JIN_D64(i) JIN_D32(i), JIN_D32(i + 32)
#define JIN_NAMES_0                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 "
#define JIN_NAMES_64                                                                      \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95 "
#define JIN_NAMES_96                                                                 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111 "
#define JIN_NAMES_112                                                              \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, " \
  "%125, %126, %127 "

#define JIN_MATMUL16(bf16, type, m_major_a, n_major_b)                                             \
  template <>                                                                                      \
  JIN_FN void Matmul16<bf16, m_major_a, n_major_b, 64>(float (&d)[64], uint32_t a, uint32_t b) {   \
    asm volatile(JIN_DESCRIPTORS("%64", "%65") "wgmma.mma_async.sync.aligned.m64n128k16.f32." type \
                                               "." type " {" JIN_NAMES_0                           \
                                               "}, a, b, 1, 1, 1, %66, %67;}"                      \
                 : JIN_D64(0)                                                                      \
                 : "r"(a), "r"(b), "n"(m_major_a), "n"(n_major_b));                                \
  }                                                                                                \
  template <>                                                                                      \
  JIN_FN void Matmul16<bf16, m_major_a, n_major_b, 96>(float (&d)[96], uint32_t a, uint32_t b) {   \
    asm volatile(JIN_DESCRIPTORS("%96", "%97") "wgmma.mma_async.sync.aligned.m64n192k16.f32." type \
                                               "." type " {" JIN_NAMES_0 ", " JIN_NAMES_64         \
                                               "}, a, b, 1, 1, 1, %98, %99;}"                      \
                 : JIN_D64(0), JIN_D32(64)                                                         \
                 : "r"(a), "r"(b), "n"(m_major_a), "n"(n_major_b));                                \
  }                                                                                                \
  template <>                                                                                      \
  JIN_FN void Matmul16<bf16, m_major_a, n_major_b, 112>(float (&d)[112], uint32_t a, uint32_t b) { \
    asm volatile(                                                                                  \
        JIN_DESCRIPTORS("%112", "%113") "wgmma.mma_async.sync.aligned.m64n224k16.f32." type        \
                                        "." type " {" JIN_NAMES_0 ", " JIN_NAMES_64                \
                                        ", " JIN_NAMES_96 "}, a, b, 1, 1, 1, %114, %115;}"         \
        : JIN_D64(0), JIN_D32(64), JIN_D16(96)                                                     \
        : "r"(a), "r"(b), "n"(m_major_a), "n"(n_major_b));                                         \
  }                                                                                                \
  template <>                                                                                      \
  JIN_FN void Matmul16<bf16, m_major_a, n_major_b, 128>(float (&d)[128], uint32_t a, uint32_t b) { \
    asm volatile(JIN_DESCRIPTORS(                                                                  \
                     "%128", "%129") "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type  \
                                     " {" JIN_NAMES_0 ", " JIN_NAMES_64 ", " JIN_NAMES_96          \
                                     ", " JIN_NAMES_112 "}, a, b, 1, 1, 1, %130, %131;}"           \
                 : JIN_D64(0), JIN_D64(64)                                                         \
                 : "r"(a), "r"(b), "n"(m_major_a), "n"(n_major_b));                                \
  }

JIN_MATMUL16(true, "bf16", false, true)
JIN_MATMUL16(true, "bf16", false, false)
JIN_MATMUL16(true, "bf16", true, true)
JIN_MATMUL16(false, "f16", false, true)
JIN_MATMUL16(false, "f16", false, false)
JIN_MATMUL16(false, "f16", true, true)

// Few columns: those of a transposed matrix of few rows.
#define JIN_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JIN_NAMES_16 JIN_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JIN_NAMES_32 \
  JIN_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JIN_MATMUL16_OF_FEW(bf16, type, columns, registers, names, of_a, of_b, ...)      \
  template <>                                                                            \
  JIN_FN void Matmul16<bf16, true, false, registers>(float (&d)[registers], uint32_t a,  \
                                                     uint32_t b) {                       \
    asm volatile(JIN_DESCRIPTORS(of_a, of_b) "wgmma.mma_async.sync.aligned.m64n" columns \
                                             "k16.f32." type "." type " {" names         \
                                             "}, a, b, 1, 1, 1, 1, 0;}"                  \
                 : __VA_ARGS__                                                           \
                 : "r"(a), "r"(b));                                                      \
  }
#define JIN_MATMULS16_OF_FEW(bf16, type)                                            \
  JIN_MATMUL16_OF_FEW(bf16, type, "16", 8, JIN_NAMES_8, "%8", "%9", JIN_D8(0))      \
  JIN_MATMUL16_OF_FEW(bf16, type, "32", 16, JIN_NAMES_16, "%16", "%17", JIN_D16(0)) \
  JIN_MATMUL16_OF_FEW(bf16, type, "64", 32, JIN_NAMES_32, "%32", "%33", JIN_D32(0))
JIN_MATMULS16_OF_FEW(true, "bf16")
JIN_MATMULS16_OF_FEW(false, "f16")

#undef JIN_MATMULS16_OF_FEW
#undef JIN_MATMUL16_OF_FEW
#undef JIN_NAMES_32
#undef JIN_NAMES_16
#undef JIN_NAMES_8
#undef JIN_MATMUL16
#undef JIN_DESCRIPTORS
#undef JIN_NAMES_112
#undef JIN_NAMES_96
#undef JIN_NAMES_64
#undef JIN_NAMES_0
#undef JIN_D64
#undef JIN_D32
#undef JIN_D16
#undef JIN_D8

}  // namespace jax_intranode::hopper
