// A call on a peer buffer: a function of a user's library, which blocks while it waits for peers.
//
// It runs in a thread of its own, never in one of XLA's. Whoever stops it sets a word that its
// waits look at. It reads and writes XLA's buffers, so its call is not complete before it has
// returned.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "../../jax_intranode/include/jax_intranode/peer_types.h"
#include "progress.h"

namespace jax_intranode {

class HostBody : public std::enable_shared_from_this<HostBody> {
 public:
  using Function = std::function<void(v1::HostWait* wait)>;

  // `name` is that of the call, for messages.
  HostBody(std::string name, Function function)
      : name_(std::move(name)), function_(std::move(function)) {}

  // Runs it, unless there is no thread for it: then started() is false, and this is to be called
  // again. `on_end` is called in its thread when it has returned.
  void Start(std::function<void()> on_end) {
    std::lock_guard lock(mutex_);
    running_ = started_ = TryRunApart([self = shared_from_this(), on_end = std::move(on_end)] {
      self->function_(&self->wait_);
      self->End();
      on_end();
    });
  }

  // Makes it return soon. True: it does not run. False: `then` is called when it has returned.
  bool Stop(std::function<void()> then) {
    std::lock_guard lock(mutex_);
    if (!running_) return true;
    std::atomic_ref(wait_.abort).store(1, std::memory_order_relaxed);
    on_stop_ = std::move(then);
    return false;
  }

  bool started() const { return started_; }
  bool ended() const {
    std::lock_guard lock(mutex_);
    return ended_;
  }
  // The rank for which it has waited last: any number, as the author of the body has passed it.
  int missing() { return std::atomic_ref(wait_.missing).load(std::memory_order_relaxed); }
  const std::string& name() const { return name_; }

 private:
  void End() {
    std::function<void()> on_stop;
    {
      std::lock_guard lock(mutex_);
      running_ = false;
      ended_ = true;
      on_stop = std::move(on_stop_);
    }
    if (on_stop) on_stop();
  }

  const std::string name_;
  const Function function_;
  bool started_ = false;  // used by the group only, under its lock
  v1::HostWait wait_{0, 0};
  mutable std::mutex mutex_;
  bool running_ = false;
  bool ended_ = false;
  std::function<void()> on_stop_;
};

}  // namespace jax_intranode
