// Numbers the call sites on CPU devices that have the same description in the HLO, in the order of
// their instantiation.
//
// One lowered function can appear twice in a program, so a site's identity needs a number in
// addition to its description. All processes must give a site the same number. They do, because a
// program is instantiated in the same order everywhere, and because the count of a description
// starts anew with each program that has it: when a thread lowers the call, and when a thread that
// has lowered it has compiled a program. So the number depends neither on what else the process has
// compiled nor on when executables are freed. XLA may instantiate in any thread. A thread that
// compiles programs of this process alone does not lower the call, so it does not disturb the
// count. No thread lowers the calls of an executable that was compiled elsewhere and loaded: their
// counts start anew whenever any thread has compiled a program. Programs with the same calls must
// be compiled one at a time. Their sites may share an identity, because a device runs one program
// after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string_view>

#include "../health/call_sites.h"
#include "registry.h"

namespace jax_intranode {

class SiteNumbers {
 public:
  // What a collective computes. The name of the program, with which the text begins, does not
  // belong to it: ranks may give one program different names.
  static uint64_t DescriptionOf(const Partition& partition, std::string_view text) {
    return Fnv1a(ToString(partition), Fnv1a(text.substr(std::min(text.find(' '), text.size()))));
  }
  // A call on a peer buffer.
  static uint64_t DescriptionOf(std::string_view buffer, std::string_view text) {
    return Fnv1a(text, Fnv1a(buffer));
  }

  static SiteNumbers& Get() {
    static SiteNumbers* const numbers = new SiteNumbers;
    return *numbers;
  }
  // This thread lowers a call.
  void Lower(uint64_t description) {
    LoweredHere().insert(description);
    std::lock_guard lock(mutex_);
    lowered_.insert(description);
    taken_.erase(description);
  }
  uint32_t Take(uint64_t description) {
    std::lock_guard lock(mutex_);
    return taken_[description]++;
  }
  // This thread has compiled a program.
  void EndCompilation() {
    std::lock_guard lock(mutex_);
    std::erase_if(taken_, [this](const auto& taken) {
      return LoweredHere().contains(taken.first) || !lowered_.contains(taken.first);
    });
  }
  // A hash of a description and its number: unique within the program.
  static uint64_t Identity(uint64_t description, uint32_t number) {
    return Fnv1a(std::string_view(reinterpret_cast<const char*>(&number), sizeof(number)),
                 description);
  }

 private:
  static std::set<uint64_t>& LoweredHere() {
    thread_local std::set<uint64_t> descriptions;
    return descriptions;
  }

  std::mutex mutex_;
  std::set<uint64_t> lowered_;  // by any thread
  std::map<uint64_t, uint32_t> taken_;
};

}  // namespace jax_intranode
