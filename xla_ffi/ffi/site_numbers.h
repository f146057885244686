// Numbers the call sites on CPU devices that have the same description in the HLO, in the order of
// their instantiation since the last compilation of this thread ended.
//
// One lowered function can appear twice in a program, so a site's identity needs a number in
// addition to its description. All processes must give a site the same number. They do, because a
// program is instantiated in the same order everywhere, by the thread that compiles it. The count
// starts anew for each program, so that it depends neither on what else a process has compiled nor
// on when executables are freed. Each thread has its own count: another one may compile a program
// that the other processes don't have. Sites of different programs may share an identity, because a
// device runs one program after the other.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>

#include "../health/call_sites.h"

namespace jax_intranode {

class SiteNumbers {
 public:
  static SiteNumbers& Get() {
    thread_local SiteNumbers numbers;
    return numbers;
  }
  uint32_t Take(uint64_t description) { return taken_[description]++; }
  void Restart() { taken_.clear(); }
  // A hash of a description and its number: unique within the program.
  static uint64_t Identity(uint64_t description, uint32_t number) {
    return Fnv1a(std::string_view(reinterpret_cast<const char*>(&number), sizeof(number)),
                 description);
  }

 private:
  std::map<uint64_t, uint32_t> taken_;
};

}  // namespace jax_intranode
