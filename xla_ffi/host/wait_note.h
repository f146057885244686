// What a rank waits in, for the messages of its peers: ranks that run different operations name
// both.
//
// The note lies in the header of the rank's own region. Its process writes it when a call has
// waited long, and clears it when that call has ended. The other processes read it. A version, odd
// while the rest is written, tells a reader that it must read again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "../kernels/group.h"

namespace jax_intranode {

class WaitNote {
 public:
  struct Content {
    uint64_t site;
    uint64_t count;  // how often the site had been called before
    std::string call;
  };

  // The note in a region of the CPU.
  static WaitNote* In(char* region) { return reinterpret_cast<WaitNote*>(region + kOffset); }

  // Only the process of the region's rank calls it, one thread at a time.
  void Write(const Content& content) {
    uint64_t words[kWords] = {content.site, content.count + 1};
    memcpy(words + 2, content.call.data(), std::min(content.call.size(), kTextBytes));
    Store(words);
  }
  void Clear() {
    const uint64_t words[kWords] = {};
    Store(words);
  }

  // What the rank waits in; nothing if it does not wait, or if the note changes all the time. A
  // peer may have written anything: the text is cut where it is not printable.
  std::optional<Content> Read() const {
    for (int attempt = 0; attempt < 8; ++attempt) {
      uint64_t words[kWords];
      const uint64_t before = Word(0).load(std::memory_order_acquire);
      for (size_t i = 0; i < kWords; ++i) words[i] = Word(i + 1).load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 != 0 || Word(0).load(std::memory_order_relaxed) != before) continue;
      if (words[1] == 0) return std::nullopt;
      Content content{words[0], words[1] - 1, ""};
      const char* text = reinterpret_cast<const char*>(words + 2);
      for (size_t i = 0; i < kTextBytes && static_cast<unsigned char>(text[i]) >= ' '; ++i) {
        content.call += text[i];
      }
      return content;
    }
    return std::nullopt;
  }

 private:
  static constexpr size_t kOffset = kHeaderBytes / 4;
  static constexpr size_t kTextBytes = 496;
  static constexpr size_t kWords = 2 + kTextBytes / 8;

  std::atomic_ref<uint64_t> Word(size_t i) const {
    return std::atomic_ref(const_cast<uint64_t&>(words_[i]));
  }
  void Store(const uint64_t (&words)[kWords]) {
    const uint64_t version = Word(0).load(std::memory_order_relaxed);
    Word(0).store(version + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t i = 0; i < kWords; ++i) Word(i + 1).store(words[i], std::memory_order_relaxed);
    Word(0).store(version + 2, std::memory_order_release);
  }

  uint64_t words_[1 + kWords];
};
static_assert(sizeof(RegionHeader) <= kHeaderBytes / 4);
static_assert(kHeaderBytes / 4 + sizeof(WaitNote) <= kHeaderBytes / 2);

}  // namespace jax_intranode
