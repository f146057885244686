// The communicators of this process, found by their partition.
//
// An HLO names a partition of devices into groups by global device ids, in group order, which is
// the same in all processes. Python registers a communicator for it before it compiles the HLO.
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

template <class Communicator>
class Registry {
 public:
  // Never destroyed: executables may outlive static destruction.
  static Registry& Get() {
    static Registry* const registry = new Registry;
    return *registry;
  }

  void Add(const Partition& partition, std::shared_ptr<Communicator> communicator) {
    std::lock_guard lock(mutex_);
    communicators_[partition] = std::move(communicator);
  }

  std::shared_ptr<Communicator> Find(const Partition& partition) const {
    std::lock_guard lock(mutex_);
    auto it = communicators_.find(partition);
    return it == communicators_.end() ? nullptr : it->second;
  }

  std::map<Partition, std::shared_ptr<Communicator>> All() const {
    std::lock_guard lock(mutex_);
    return communicators_;
  }

  // Removes all communicators. They stay alive as long as executables use them.
  void Clear() {
    std::lock_guard lock(mutex_);
    std::erase_if(cleared_, [](const auto& entry) { return entry.second.expired(); });
    for (const auto& [partition, communicator] : communicators_) {
      cleared_.emplace_back(partition, communicator);
    }
    communicators_.clear();
  }

  // All communicators, including those that were cleared but are still alive.
  std::vector<std::pair<Partition, std::shared_ptr<Communicator>>> Alive() const {
    std::lock_guard lock(mutex_);
    std::vector<std::pair<Partition, std::shared_ptr<Communicator>>> alive(communicators_.begin(),
                                                                           communicators_.end());
    for (const auto& [partition, communicator] : cleared_) {
      if (auto locked = communicator.lock()) alive.emplace_back(partition, std::move(locked));
    }
    return alive;
  }

 private:
  mutable std::mutex mutex_;
  std::map<Partition, std::shared_ptr<Communicator>> communicators_;
  std::vector<std::pair<Partition, std::weak_ptr<Communicator>>> cleared_;
};

}  // namespace jax_intranode
