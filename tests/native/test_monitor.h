// CPU groups in one address space, each of which stands for a process, and what watches over them
// as the monitor (xla_ffi/health/monitor.h) does: each hears what the others wait in.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/native/regions.h"
#include "xla_ffi/health/waits.h"
#include "xla_ffi/host/host_group.h"

namespace jax_intranode {

// The groups of `processes` processes, each of which has a contiguous part of the ranks. The device
// of rank r has the id 10 + r.
inline std::vector<std::shared_ptr<HostGroup>> GroupsOf(const Regions& regions, int processes,
                                                        std::chrono::nanoseconds timeout) {
  Group layout{};
  regions.GiveTo(&layout);
  const int n = regions.ranks();
  std::vector<int64_t> ids;
  for (int r = 0; r < n; ++r) ids.push_back(10 + r);
  std::vector<std::shared_ptr<HostGroup>> groups;
  for (int p = 0; p < processes; ++p) {
    std::vector<int> local;
    for (int r = 0; r < n; ++r) {
      if (r * processes / n == p) local.push_back(r);
    }
    groups.push_back(std::make_shared<HostGroup>(layout, local, ids, timeout, nullptr));
  }
  return groups;
}

class TestMonitor {
 public:
  using Groups = std::vector<std::shared_ptr<HostGroup>>;

  explicit TestMonitor(Groups groups, Clock::duration patience = std::chrono::hours(1))
      : groups_(std::move(groups)),
        reports_(groups_.size(), WaitReports([](int64_t) { return std::string(); })),
        patience_(patience) {
    thread_ = std::thread([this] {
      while (!ends_) {
        {
          const auto looks = Hold();
          LookAtAll();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
  }
  ~TestMonitor() {
    ends_ = true;
    thread_.join();
  }

  // It does not look, and so moves no group, while this lock is held.
  std::unique_lock<std::mutex> Hold() { return std::unique_lock(looks_); }

  // To the monitor it seems that so much time passes, in which it looks each second.
  void Pass(std::chrono::seconds time) {
    const auto looks = Hold();
    for (auto end = passed_ + time; passed_ < end;) {
      passed_ += std::chrono::seconds(1);
      LookAtAll();
    }
  }

  std::vector<std::string> TakeWarnings() {
    std::lock_guard lock(mutex_);
    return std::exchange(warnings_, {});
  }

 private:
  void LookAtAll() {
    for (size_t i = 0; i < groups_.size(); ++i) Look(i);
  }
  void Look(size_t i) {
    const Clock::time_point now = Clock::now() + passed_;
    std::vector<Wait> waits;
    groups_[i]->Look(now, {}, &waits);
    const auto outcome = reports_[i].Update(waits, now, patience_);
    for (const WaitNote& note : outcome.notes) {
      for (size_t other = 0; other < reports_.size(); ++other) {
        if (other != i) reports_[other].Hear(ParseNote(TextOf(note)).value(), now);
      }
    }
    for (const auto& [wait, reason] : outcome.over) wait.give_up(Failure(reason, wait));
    std::lock_guard lock(mutex_);
    for (const std::string& warning : outcome.warnings) warnings_.push_back(warning);
  }

  const Groups groups_;
  std::vector<WaitReports> reports_;
  const Clock::duration patience_;
  std::chrono::seconds passed_{0};
  std::atomic<bool> ends_{false};
  std::mutex looks_, mutex_;
  std::vector<std::string> warnings_;
  std::thread thread_;
};

}  // namespace jax_intranode
