// The threads on which protocol_test.cc runs the protocols.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "xla_ffi/kernels/experts.h"
#include "xla_ffi/kernels/hybrid_cube_mesh.h"
#include "xla_ffi/kernels/one_hop.h"
#include "xla_ffi/kernels/permute.h"
#include "xla_ffi/kernels/ragged.h"
#include "xla_ffi/kernels/routed_dispatch.h"

namespace protocol_test {

namespace jin = jax_intranode;

constexpr int kThreads = 2;
// The most updates of a rank in a ragged all-to-all.
constexpr int kMaxUpdatesHere = 32;
using Table = jin::RaggedTableOf<kMaxUpdatesHere>;
struct RoutingTable {
  jin::RoutingTable table;
  uint32_t of_lane[kThreads];
};

inline std::chrono::duration<double> patience{10};
inline std::atomic<bool> was_busy{false};
inline std::atomic<long> others_met{0};

// Pauses a thread now and then, so that ranks run apart.
class Jitter {
 public:
  explicit Jitter(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  void Pause() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    if (state_ % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state_ % 97));
  }

 private:
  uint64_t state_;
};

struct HostThread {
  int thread, block, blocks;
  std::barrier<>* barrier;
  Jitter* jitter;
  Table* table = nullptr;  // of the block
  RoutingTable* routing = nullptr;
  std::chrono::steady_clock::time_point started{};
  bool met = false;

  int Thread() const { return thread; }
  int Threads() const { return kThreads; }
  int Block() const { return block; }
  int Blocks() const { return blocks; }
  void Sync() const { barrier->arrive_and_wait(); }
  size_t First() const { return block * kThreads + thread; }
  size_t Stride() const { return blocks * kThreads; }
  int FirstUpdate() const { return thread; }
  // For routed dispatches. LanesThread has a warp of more than one thread.
  static constexpr uint32_t kLanes = 1;
  jin::SameLanes Same(uint32_t) const { return {0, 1}; }
  void SyncLanes() const {}
  void Add(uint32_t* sum, uint32_t v) const {
    std::atomic_ref<uint32_t>(*sum).fetch_add(v, std::memory_order_relaxed);
  }
  bool Wait(size_t, int) {
    if (started == std::chrono::steady_clock::time_point()) {
      started = std::chrono::steady_clock::now();
    }
    if (std::chrono::steady_clock::now() - started > patience) {
      printf("a wait without end\n");
      fflush(stdout);
      std::_Exit(1);
    }
    jitter->Pause();
    std::this_thread::yield();
    return true;
  }
  void Enter(uint32_t* busy, uint32_t*) {
    if (thread == 0 && jin::Exchange(busy, 1) != 0) met = true;
  }
  void Arrived() { started = {}; }
  void FenceSegment() {
    jin::Fence();
    jitter->Pause();
  }
  void Admit() {
    if (met) was_busy = true;
  }
  void Admit(uint32_t, uint32_t) {}
  void MeetsOther(int, uint64_t) { ++others_met; }
  void Refuse(const jin::UpdateFault&) { ++others_met; }
};

// The threads of a block are a warp.
struct LanesThread : HostThread {
  static constexpr uint32_t kLanes = kThreads;
  explicit LanesThread(const HostThread& thread) : HostThread(thread) {}
  jin::SameLanes Same(uint32_t v) const {
    routing->of_lane[thread] = v;
    Sync();
    jin::SameLanes same = {};
    for (int i = 0; i < kThreads; ++i) {
      same.before += i < thread && routing->of_lane[i] == v;
      same.all += routing->of_lane[i] == v;
    }
    Sync();
    return same;
  }
  void SyncLanes() const { Sync(); }
};

// A group as the protocols see it.
struct TestGroup : jin::Group {
  jin::Links links{};  // in a hybrid cube mesh
  uint64_t operation;
};

}  // namespace protocol_test
