// The groups of CPU devices, as the monitor sees them (health/monitor.h).
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../health/platform.h"
#include "collectives_host.h"
#include "site_numbers.h"

namespace jax_intranode {

class HostPlatform final : public Platform {
 public:
  static HostPlatform& Get() {
    static HostPlatform* const platform = new HostPlatform;
    return *platform;
  }

  // A communicator that is new.
  void Add(const Partition& partition, std::shared_ptr<HostCommunicator> communicator) {
    std::lock_guard lock(mutex_);
    for (const auto& [device, member] : communicator->members) member.group->SetAbsent(absent_);
    Registry<HostCommunicator>::Get().Add(partition, std::move(communicator));
  }

  bool OnGpu() const override { return false; }

  void SetAbsent(const AbsentDevices& absent) override {
    std::lock_guard lock(mutex_);
    absent_ = absent;
    for (const auto& [group, name] : Groups()) group->SetAbsent(absent);
  }
  std::vector<Wait> Look(Clock::time_point now, Clock::duration stopped) override {
    std::vector<Wait> waits;
    for (const auto& [group, name] : Groups()) {
      const size_t first = waits.size();
      group->Look(now, stopped, &waits);
      for (size_t i = first; i < waits.size(); ++i) waits[i].group = name;
    }
    return waits;
  }
  std::vector<Failure> TakeFailures() override {
    std::vector<Failure> failures;
    for (const auto& [group, name] : Groups()) {
      for (Failure& failure : group->TakeFailures()) failures.push_back(std::move(failure));
    }
    return failures;
  }
  uint64_t Calls() override { return host_handler_calls.load(); }

 private:
  // All groups, with the names of their partitions.
  static std::map<std::shared_ptr<HostGroup>, uint64_t> Groups() {
    std::map<std::shared_ptr<HostGroup>, uint64_t> groups;
    Registry<HostCommunicator>::Get().ForEachAlive(
        [&](const Partition& partition, const HostCommunicator& communicator) {
          for (const auto& [device, member] : communicator.members) {
            groups[member.group] = Fnv1a(ToString(partition));
          }
        });
    return groups;
  }

  std::mutex mutex_;
  AbsentDevices absent_;
};

}  // namespace jax_intranode
