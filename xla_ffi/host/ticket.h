// What a caller of a CPU group waits for.
#pragma once

#include <functional>
#include <mutex>
#include <string>

namespace jax_intranode {

// One rank's part in one call; completed once.
class Ticket {
 public:
  // `error` is empty when all went well.
  using OnDone = std::function<void(const std::string& error)>;

  bool Done() const;
  // The error of a completed ticket.
  std::string Error() const;
  // Calls `on_done` when the ticket is completed: in a thread on which no group depends, or at once
  // in this thread if it is complete already.
  void Then(OnDone on_done);

  // To be called once.
  void Complete(const std::string& error);

 private:
  mutable std::mutex mutex_;
  bool done_ = false;
  std::string error_;
  OnDone on_done_;
};

}  // namespace jax_intranode
