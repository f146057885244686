#include "ticket.h"

#include <utility>

#include "progress.h"

namespace jax_intranode {

bool Ticket::Done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

std::string Ticket::Error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void Ticket::Then(OnDone on_done) {
  {
    std::lock_guard lock(mutex_);
    if (!done_) {
      on_done_ = std::move(on_done);
      return;
    }
  }
  on_done(error_);
}

void Ticket::Complete(const std::string& error) {
  OnDone on_done;
  {
    std::lock_guard lock(mutex_);
    done_ = true;
    error_ = error;
    on_done = std::move(on_done_);
  }
  // XLA continues its program inside `on_done` and may block there, so this must not be a thread on
  // which other calls depend.
  if (on_done) RunApart([on_done = std::move(on_done), error] { on_done(error); });
}

}  // namespace jax_intranode
