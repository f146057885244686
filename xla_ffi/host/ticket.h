// What a caller of a CPU group waits for.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "progress.h"

namespace jax_intranode {

// One rank's part in one call; completed once.
class Ticket {
 public:
  // `error` is empty when all went well.
  using OnDone = std::function<void(const std::string& error)>;

  bool Done() const {
    std::lock_guard lock(mutex_);
    return done_;
  }
  // The error of a completed ticket.
  std::string Error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }

  // Calls `on_done` when the ticket is completed: in a thread on which no group depends, or at once
  // in this thread if it is complete already.
  void Then(OnDone on_done) {
    {
      std::lock_guard lock(mutex_);
      if (!done_) {
        on_done_ = std::move(on_done);
        return;
      }
    }
    on_done(error_);
  }

  // To be called once.
  void Complete(const std::string& error) {
    OnDone on_done;
    {
      std::lock_guard lock(mutex_);
      done_ = true;
      error_ = error;
      on_done = std::move(on_done_);
    }
    // XLA continues its program inside `on_done` and may block there, so this must not be a thread
    // on which other calls depend.
    if (on_done) RunApart([on_done = std::move(on_done), error] { on_done(error); });
  }

 private:
  mutable std::mutex mutex_;
  bool done_ = false;
  std::string error_;
  OnDone on_done_;
};

}  // namespace jax_intranode
