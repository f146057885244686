// The threads on which protocol_test.cc runs the protocols, and its ways to break them.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla_ffi/kernels/experts.h"
#include "xla_ffi/kernels/hybrid_cube_mesh.h"
#include "xla_ffi/kernels/norm_protocol.h"
#include "xla_ffi/kernels/one_hop.h"
#include "xla_ffi/kernels/permute.h"
#include "xla_ffi/kernels/ragged.h"

namespace protocol_test {

namespace jin = jax_intranode;

constexpr int kThreads = 2;
// The most updates of a rank in a ragged all-to-all.
constexpr int kMaxUpdatesHere = 32;
using Table = jin::RaggedTableOf<kMaxUpdatesHere>;

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
  std::vector<float>* totals;  // of the block's threads (norm.h)
  Table* table = nullptr;      // of the block
  bool changes = false;        // the next thread's packs in every second phase
  std::chrono::steady_clock::time_point started{};
  bool met = false;
  int phases = 0;

  int Thread() const { return thread; }
  int Threads() const { return kThreads; }
  int Block() const { return block; }
  int Blocks() const { return blocks; }
  void Sync() const { barrier->arrive_and_wait(); }
  size_t First() {
    const size_t first = block * kThreads + thread;
    return phases++ % 2 == 1 && changes ? (first + 1) % Stride() : first;
  }
  size_t Stride() const { return blocks * kThreads; }
  static constexpr int kRowThreads = kThreads;
  size_t FirstUnit() const { return 0; }
  int FirstUpdate() const { return thread; }
  template <uint32_t kMost>
  float Total(float (&v)[kMost], uint32_t count) {
    for (uint32_t j = 0; j < count; ++j) (*totals)[j * kThreads + thread] = v[j];
    Sync();
    float all[kThreads * kMost];
    std::copy_n(totals->begin(), kThreads * count, all);
    Sync();
    return jin::TotalOfPairs(all, kThreads * count);
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

// A group as the protocols see it, and the ways to break it.
struct TestGroup : jin::Group {
  bool one_epoch_buffer = false;
  bool one_operation_word = false;
  bool short_segment = false;
  bool no_room = false;
  jin::Links links{};  // in a hybrid cube mesh
  uint64_t operation;
  uint64_t* OperationOf(int of, int to, uint32_t count) const {
    return jin::Group::OperationOf(of, to, one_operation_word ? 0 : count);
  }
  char* EpochBuffer(int of_rank, uint32_t epoch) const {
    return jin::Group::EpochBuffer(of_rank, one_epoch_buffer ? 0 : epoch);
  }
};

// Takes the place of permute.h's: a rank sends to its destination at once, or does not.
inline bool HasRoom(const TestGroup& g, int to, uint32_t epoch) {
  return g.no_room || jin::HasRoom<TestGroup>(g, to, epoch);
}

// Takes the place of ragged.h's: a rank sends all windows at once, or does not.
inline bool HasTaken(const TestGroup& g, int to, int block, uint32_t windows) {
  return g.no_room || jin::HasTaken<TestGroup>(g, to, block, windows);
}

inline bool never_armed = false;
// Only the first word of a packet is checked. This breaks floating-point calls only: the words of a
// flagged packet may have any value, and it would wait for ever.
inline bool first_word_only = false;

// Packets as they are, or broken.
template <class Packets>
struct MaybeBroken : Packets {
  static constexpr bool kBare = std::is_same_v<Packets, jin::BarePackets>;
  static void Arm(char* slot, size_t i) {
    if (!never_armed) Packets::Arm(slot, i);
  }
  static bool TryGet(char* slot, size_t i, jin::Pack* p) {
    const bool all = Packets::TryGet(slot, i, p);
    return kBare && first_word_only ? p->word[0] != jin::kEmpty : all;
  }
  static void Put(char* slot, size_t i, const jin::Pack& p) {
    if (kBare && first_word_only) {
      jin::Pack first = p;
      for (int k = 1; k < 4; ++k) first.word[k] = jin::kEmpty;
      Packets::Put(slot, i, first);
      std::this_thread::yield();
    }
    Packets::Put(slot, i, p);
  }
};

}  // namespace protocol_test
