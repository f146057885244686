// The buffers of one call: inputs and outputs.
//
// Algorithms see a call as packs 0 ... Packs() - 1. A call has one buffer, or many of one element
// type, which one operation sums. Each buffer begins with a pack of its own, so that no pack
// crosses from one buffer to the next. `in` and `out` of a buffer may be the same.
#pragma once

#include "memory.h"

namespace jax_intranode {

// Packs past the end read as zero and are not stored. Two-shot's last shard may have some.
struct Buffer {
  const void* in;
  void* out;
  size_t bytes;

  JIN_PACK_FN size_t Packs() const { return PacksOf(bytes); }
  JIN_PACK_FN Pack Load(size_t i) const { return LoadInput(in, bytes, i, Aligned()); }
  JIN_PACK_FN void Store(size_t i, const Pack& p) const {
    StoreOutput(out, bytes, i, Aligned(), p);
  }

  // Rank r's shard of an input, or of an output, that holds a shard of `bytes` for each rank.
  JIN_PACK_FN Buffer InputOf(int r) const {
    return {static_cast<const char*>(in) + r * bytes, out, bytes};
  }
  JIN_PACK_FN Buffer OutputOf(int r) const {
    return {in, static_cast<char*>(out) + r * bytes, bytes};
  }

 private:
  JIN_PACK_FN bool Aligned() const {
    return ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) & 15) == 0;
  }
};

// The common case, without a test at every pack: `in` and `out` are aligned, and there are only
// whole packs; in two-shot, a multiple of the group's size.
struct AlignedBuffer {
  const void* in;
  void* out;
  size_t bytes;

  // Host only.
  static bool Is(const Buffer& b, size_t multiple_of_packs) {
    return ((reinterpret_cast<uintptr_t>(b.in) | reinterpret_cast<uintptr_t>(b.out)) &
            (sizeof(Pack) - 1)) == 0 &&
           b.bytes % (multiple_of_packs * sizeof(Pack)) == 0;
  }

  JIN_PACK_FN size_t Packs() const { return bytes / sizeof(Pack); }
  JIN_PACK_FN Pack Load(size_t i) const { return static_cast<const Pack*>(in)[i]; }
  JIN_PACK_FN void Store(size_t i, const Pack& p) const { static_cast<Pack*>(out)[i] = p; }

  JIN_FN AlignedBuffer InputOf(int r) const {
    return {static_cast<const char*>(in) + r * bytes, out, bytes};
  }
  JIN_FN AlignedBuffer OutputOf(int r) const {
    return {in, static_cast<char*>(out) + r * bytes, bytes};
  }
};

// The part, from `low` to `high`, that pack i lies in. Part k ends before pack end[k].
JIN_FN int PartOf(size_t i, const uint32_t* end, int low, int high) {
  while (low < high) {
    const int middle = (low + high) / 2;
    if (i < end[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The most buffers that fit into a kernel's parameters together with its group: every driver
// accepts 4 KB. More buffers take more than one operation.
constexpr int kMaxBuffers = 128;
// The most packs of many buffers together.
constexpr size_t kMaxPacks = UINT32_MAX;

struct Buffers {
  Buffer buffer[kMaxBuffers];
  uint32_t end[kMaxBuffers];  // the pack after the last one of each
  int count = 0;

  // Host only. `count` must be less than kMaxBuffers.
  void Append(const Buffer& b) {
    buffer[count] = b;
    end[count] = static_cast<uint32_t>((count == 0 ? 0 : end[count - 1]) + PacksOf(b.bytes));
    ++count;
  }

  JIN_PACK_FN size_t Packs() const { return end[count - 1]; }
  JIN_PACK_FN Pack Load(size_t i) const {
    const int b = Find(i);
    return buffer[b].Load(i - Begin(b));
  }
  JIN_PACK_FN void Store(size_t i, const Pack& p) const {
    const int b = Find(i);
    buffer[b].Store(i - Begin(b), p);
  }

 private:
  JIN_PACK_FN size_t Begin(int b) const { return b == 0 ? 0 : end[b - 1]; }
  // The buffer that pack i lies in; the last one for packs past the end.
  JIN_PACK_FN int Find(size_t i) const { return PartOf(i, end, 0, count - 1); }
};

}  // namespace jax_intranode
