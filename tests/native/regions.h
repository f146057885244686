// Memory of ranks in one address space, for tests of the protocols and of the CPU groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "xla_ffi/kernels/group.h"

namespace jax_intranode {

// The regions of ranks, zeroed and armed, in which the next operation has a given epoch.
class Regions {
 public:
  Regions(int ranks, size_t epoch_buffer_bytes, uint32_t epoch = 0)
      : epoch_buffer_bytes_(epoch_buffer_bytes), memory_(ranks) {
    for (int r = 0; r < ranks; ++r) {
      memory_[r].resize((kHeaderBytes + 2 * epoch_buffer_bytes) / sizeof(Line));
      memset(At(r) + kHeaderBytes, 0xFF, 2 * epoch_buffer_bytes);
      for (uint32_t& of_block : Header(r)->epoch) of_block = epoch;
      for (uint32_t& of_rank : Header(r)->begun) of_rank = epoch;
      Header(r)->operations = epoch;
    }
  }
  int ranks() const { return static_cast<int>(memory_.size()); }
  char* At(int rank) const { return const_cast<char*>(memory_[rank][0].bytes); }
  RegionHeader* Header(int rank) const { return reinterpret_cast<RegionHeader*>(At(rank)); }
  // Lets a group have all of them.
  void GiveTo(Group* group) const {
    for (int r = 0; r < ranks(); ++r) group->region[r] = At(r);
    group->epoch_buffer_bytes = epoch_buffer_bytes_;
    group->size = ranks();
  }
  // The bytes that are not armed.
  size_t BytesLeft() const {
    size_t left = 0;
    for (int r = 0; r < ranks(); ++r) {
      for (size_t i = 0; i < 2 * epoch_buffer_bytes_; ++i) {
        left += At(r)[kHeaderBytes + i] != static_cast<char>(0xFF);
      }
    }
    return left;
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  const size_t epoch_buffer_bytes_;
  std::vector<std::vector<Line>> memory_;
};

// Bytes at an address that is `shift` after a multiple of 16, between guard bytes.
class Guarded {
 public:
  Guarded(size_t bytes, size_t shift)
      : bytes_(bytes), memory_(bytes + 2 * kGuardBytes + 32, kGuard) {
    const auto begin = reinterpret_cast<uintptr_t>(memory_.data()) + kGuardBytes;
    offset_ = kGuardBytes + (16 - begin % 16) % 16 + shift;
  }
  char* data() { return memory_.data() + offset_; }
  const char* data() const { return memory_.data() + offset_; }
  size_t size() const { return bytes_; }
  // The number of guard bytes that were overwritten.
  long Hit() const {
    long hit = 0;
    for (size_t i = 0; i < memory_.size(); ++i) {
      hit += (i < offset_ || i >= offset_ + bytes_) && memory_[i] != kGuard;
    }
    return hit;
  }
  // Whether the bytes are these, and the guards are whole.
  bool Holds(const std::vector<char>& bytes) const {
    return Hit() == 0 && std::equal(bytes.begin(), bytes.end(), data());
  }

  static constexpr char kGuard = 0x5A;

 private:
  static constexpr size_t kGuardBytes = 32;
  size_t bytes_, offset_;
  std::vector<char> memory_;
};

}  // namespace jax_intranode
