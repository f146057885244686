// What Python has registered in this process before it compiles a program that names it:
// communicators, by their partition, and peer buffers, by their name.
//
// An HLO names a partition of devices into groups by global device ids, in group order, which is
// the same in all processes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace jax_intranode {

// The device ids of all groups one after another, the size of a group, and whether it is the region
// of permutes that serves them (kernels/permute.h).
struct Partition {
  std::vector<int64_t> ids;
  int64_t size;
  bool permutes = false;
  auto operator<=>(const Partition&) const = default;
};

inline std::string ToString(const Partition& partition) {
  std::string text;
  const auto& [ids, size, permutes] = partition;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool begins = size > 0 && i % size == 0;
    text += i == 0 ? "(" : begins ? "), (" : ", ";
    text += std::to_string(ids[i]);
  }
  return text + (permutes ? ") for permutes" : ")");
}

template <class Thing, class Key = Partition>
class Registry {
 public:
  // Never destroyed: executables may outlive static destruction.
  static Registry& Get() {
    static Registry* const registry = new Registry;
    return *registry;
  }

  // Returns what had the key before.
  std::shared_ptr<Thing> Add(const Key& key, std::shared_ptr<Thing> thing) {
    Thing* const added = thing.get();
    // Whoever drops the last reference takes the thing from the list first.
    thing = {added, [this, owner = std::move(thing)](Thing* gone) {
               std::lock_guard lock(mutex_);
               std::erase_if(alive_, [&](const auto& entry) { return entry.second == gone; });
             }};
    std::lock_guard lock(mutex_);
    alive_.emplace_back(key, added);
    return std::exchange(open_[key], std::move(thing));
  }

  std::shared_ptr<Thing> Find(const Key& key) const {
    std::lock_guard lock(mutex_);
    const auto found = open_.find(key);
    return found == open_.end() ? nullptr : found->second;
  }

  std::map<Key, std::shared_ptr<Thing>> All() const {
    std::lock_guard lock(mutex_);
    return open_;
  }

  // Removes one; null if it is not there. What was removed stays alive as long as executables use
  // it.
  std::shared_ptr<Thing> Remove(const Key& key) {
    std::lock_guard lock(mutex_);
    const auto found = open_.extract(key);
    return found.empty() ? nullptr : found.mapped();
  }
  void Clear() {
    std::map<Key, std::shared_ptr<Thing>> cleared;  // dropped without the lock
    std::lock_guard lock(mutex_);
    cleared.swap(open_);
  }

  // Calls `act(key, thing)` for all, including those that were removed but are still alive. None of
  // them is destroyed meanwhile, and this holds no reference: a caller that must not wait, as the
  // destruction of memory may, never has the last one. `act` must not use the registry.
  template <class Act>
  void ForEachAlive(const Act& act) const {
    std::lock_guard lock(mutex_);
    for (const auto& [key, thing] : alive_) act(key, *thing);
  }

 private:
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Thing>> open_;
  std::vector<std::pair<Key, Thing*>> alive_;
};

}  // namespace jax_intranode
