// What messages say of a call site: the shapes of its operands, and where it is in the program.
//
// Lowering describes a site by its text (the attribute `site` of the HLO, the same in all
// processes). The source line is not in the HLO, because a cached executable must not depend on it.
// Instantiate gives each text a number.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace jax_intranode {

// The number of a text that all processes give it: FNV-1a.
constexpr uint64_t FnvStep(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x100000001B3u;
}
inline uint64_t Fnv1a(std::string_view text, uint64_t hash = 0xCBF29CE484222325u) {
  for (unsigned char c : text) hash = FnvStep(hash, c);
  return hash;
}

class CallSites {
 public:
  // Never destroyed: threads may ask for a label while the process ends.
  static CallSites& Get() {
    static CallSites* const sites = new CallSites;
    return *sites;
  }

  // The operation of a site, the bytes of its operand on one device, and a label, for instance
  // "float32[100], train.py:10 (step)".
  void Describe(const std::string& site, const std::string& operation, uint64_t bytes,
                const std::string& label) {
    std::lock_guard lock(mutex_);
    described_[site] = {operation, bytes, label};
  }

  // A program with a call site of this text has been loaded; `number` names the text.
  void Name(uint64_t number, const std::string& site) {
    std::lock_guard lock(mutex_);
    sites_[number] = site;
    ++calls_[site];
  }

  // The number of a site, from 1 on; each call of Number gives the same text the same one. A kernel
  // gets it, and it does not leave the process.
  uint32_t Number(const std::string& site) {
    std::lock_guard lock(mutex_);
    const auto [number, first] =
        numbers_.try_emplace(site, static_cast<uint32_t>(numbers_.size() + 1));
    if (first) sites_[number->second] = site;
    ++calls_[site];
    return number->second;
  }

  // Whether several calls have this text. JAX lowers equal calls of a program once, so that only
  // the place of the first one is known.
  bool IsShared(const std::string& site) const {
    std::lock_guard lock(mutex_);
    const auto calls = calls_.find(site);
    return calls != calls_.end() && calls->second > 1;
  }

  // The text of a site; empty if it is not known.
  std::string SiteOf(uint64_t number) const {
    std::lock_guard lock(mutex_);
    const auto site = sites_.find(number);
    return site == sites_.end() ? "" : site->second;
  }

  // The name of a call, for messages: "psum of 400 bytes (float32[100], train.py:10 (step))". What
  // is given counts before what lowering has described; empty and 0: not known. `shared`: several
  // calls have this text. A process that has loaded the executable from elsewhere knows no label.
  std::string NameOf(const std::string& site, bool shared, std::string operation,
                     uint64_t bytes) const {
    std::lock_guard lock(mutex_);
    const auto found = described_.find(site);
    const Description known =
        found == described_.end() ? Description{"an operation", 0, site} : found->second;
    if (operation.empty()) operation = known.operation;
    if (bytes == 0) bytes = known.bytes;
    if (bytes > 0) operation += " of " + std::to_string(bytes) + " bytes";
    if (known.label.empty()) return operation;
    return operation + " (" + known.label + (shared ? " or an equal call)" : ")");
  }

 private:
  mutable std::mutex mutex_;
  struct Description {
    std::string operation;
    uint64_t bytes;
    std::string label;
  };
  std::map<std::string, Description> described_;
  std::map<uint64_t, std::string> sites_;  // by number
  std::map<std::string, uint32_t> numbers_;
  std::map<std::string, uint32_t> calls_;  // how many have a text
};

}  // namespace jax_intranode
