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

// The device ids of all groups one after another, and the size of a group.
using Partition = std::pair<std::vector<int64_t>, int64_t>;

inline std::string ToString(const Partition& partition) {
  std::string text;
  const auto& [ids, size] = partition;
  for (size_t i = 0; i < ids.size(); ++i) {
    text += i % size == 0 ? (i == 0 ? "(" : "), (") : ", ";
    text += std::to_string(ids[i]);
  }
  return text + ")";
}

template <class Thing, class Key = Partition>
class Registry {
 public:
  // Never destroyed: executables may outlive static destruction.
  static Registry& Get() {
    static Registry* const registry = new Registry;
    return *registry;
  }

  void Add(const Key& key, std::shared_ptr<Thing> thing) {
    std::lock_guard lock(mutex_);
    std::erase_if(added_, [](const auto& entry) { return entry.second.expired(); });
    added_.emplace_back(key, thing);
    open_[key] = std::move(thing);
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
    std::lock_guard lock(mutex_);
    open_.clear();
  }

  // All, including those that were removed but are still alive.
  std::vector<std::pair<Key, std::shared_ptr<Thing>>> Alive() const {
    std::lock_guard lock(mutex_);
    std::vector<std::pair<Key, std::shared_ptr<Thing>>> alive;
    for (const auto& [key, thing] : added_) {
      if (auto locked = thing.lock()) alive.emplace_back(key, std::move(locked));
    }
    return alive;
  }

 private:
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Thing>> open_;
  std::vector<std::pair<Key, std::weak_ptr<Thing>>> added_;
};

}  // namespace jax_intranode
