// The log in which the leader of a CPU group says which call comes next (host_group.h).
//
// Who writes an entry: the leader. Who reads it: the other processes, and the leader itself. The
// sequence number is stored last, with release order, and loaded first, with acquire order. The
// leader may reuse the entry of call e for e + kEntries when its own call e has ended: then it has
// had a packet of every rank, so every process had read the entry. It does not hear from every rank
// in a permute, so there it waits until each rank has begun call e (kernels/permute.h).
//
// Model: tests/native/model/log_model.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace jax_intranode {

template <uint32_t kEntries>
class CallLog {
  static_assert((kEntries & (kEntries - 1)) == 0, "the epoch wraps");

 public:
  struct Call {
    uint64_t site;
    uint32_t count;
  };
  struct Entry {
    uint32_t sequence;  // the call's number plus 1
    uint32_t count;
    uint64_t site;
  };

  explicit CallLog(void* entries) : entries_(static_cast<Entry*>(entries)) {}

  // Whether the leader may log call `logged` when `sequence` is the first that has not ended, or
  // that a rank has not begun.
  static bool HasRoom(uint32_t logged, uint32_t sequence) { return logged - sequence < kEntries; }

  void Append(uint32_t logged, const Call& call) {
    Entry& entry = entries_[logged % kEntries];
    std::atomic_ref(entry.count).store(call.count, std::memory_order_relaxed);
    std::atomic_ref(entry.site).store(call.site, std::memory_order_relaxed);
    std::atomic_ref(entry.sequence).store(logged + 1, std::memory_order_release);
  }

  // The call of number `sequence`, if it has been logged.
  std::optional<Call> Read(uint32_t sequence) const {
    Entry& entry = entries_[sequence % kEntries];
    if (std::atomic_ref(entry.sequence).load(std::memory_order_acquire) != sequence + 1) {
      return std::nullopt;
    }
    return Call{std::atomic_ref(entry.site).load(std::memory_order_relaxed),
                std::atomic_ref(entry.count).load(std::memory_order_relaxed)};
  }

 private:
  Entry* entries_;
};

}  // namespace jax_intranode
