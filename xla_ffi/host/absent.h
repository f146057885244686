// The devices whose process is not present, by what the watch of the peers has told. From this set
// follows whether a group may wait: the return of one peer can't hide the absence of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "peer_event.h"

namespace jax_intranode {

class AbsentDevices {
 public:
  // As PeerSink::on_peer.
  void Set(PeerState state, const int64_t* ids, size_t count, const std::string& what) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
      if (state == PeerState::kPresent) {
        absent_.erase(ids[i]);
      } else {
        absent_[ids[i]] = what;
      }
    }
  }

  // What became of the first absent device of a group; nothing if all are present.
  std::optional<std::string> In(const std::vector<int64_t>& group) const {
    std::lock_guard lock(mutex_);
    for (const int64_t id : group) {
      if (const auto found = absent_.find(id); found != absent_.end()) return found->second;
    }
    return std::nullopt;
  }

  // The watches that told it have ended.
  void Clear() {
    std::lock_guard lock(mutex_);
    absent_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::string> absent_;
};

}  // namespace jax_intranode
