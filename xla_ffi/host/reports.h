// What the groups of this process have to tell: failures, and waits that have lasted long. Python's
// watcher takes them (jax_intranode/_src/watcher.py).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/failure_reason.h"

namespace jax_intranode {

struct FailureReport {
  std::string message;
  FailureReason reason;
  std::string operation;
  uint64_t bytes;
  std::string site;  // text of the call site; empty if it is not known
  uint32_t calls;    // how often the site had been called before
  int rank;
  int missing;                      // -1: none
  std::vector<int64_t> device_ids;  // of the group, in rank order
};

class Reports {
 public:
  static Reports& Get() {
    static Reports* const reports = new Reports;
    return *reports;
  }

  void Fail(FailureReport report) {
    std::lock_guard lock(mutex_);
    failures_.push_back(std::move(report));
  }
  void Warn(std::string message) {
    std::lock_guard lock(mutex_);
    warnings_.push_back(std::move(message));
  }
  // Each report is taken once.
  std::vector<FailureReport> TakeFailures() {
    std::lock_guard lock(mutex_);
    return std::exchange(failures_, {});
  }
  std::vector<std::string> TakeWarnings() {
    std::lock_guard lock(mutex_);
    return std::exchange(warnings_, {});
  }

  // How long a rank waits before it tells.
  std::chrono::nanoseconds patience() const { return std::chrono::nanoseconds(patience_ns_); }
  void set_patience(std::chrono::nanoseconds patience) { patience_ns_ = patience.count(); }

 private:
  std::mutex mutex_;
  std::vector<FailureReport> failures_;
  std::vector<std::string> warnings_;
  std::atomic<int64_t> patience_ns_{10'000'000'000};
};

}  // namespace jax_intranode
