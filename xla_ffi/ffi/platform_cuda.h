// The communicators and peer buffers on the GPUs of this process, as the monitor sees them
// (health/monitor.h). It reads what kernels write to host memory (cuda/failure.h), and sets the
// word that tells them to give up. Nothing here calls CUDA.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../health/call_sites.h"
#include "../health/platform.h"
#include "../kernels/same_operation.h"
#include "collectives_cuda.h"
#include "site_numbers.h"

namespace jax_intranode {

class CudaPlatform final : public Platform {
 public:
  static CudaPlatform& Get() {
    static CudaPlatform* const platform = new CudaPlatform;
    return *platform;
  }

  // Something is new: a communicator, a region or a peer buffer. `add` returns what it replaces.
  template <class Add>
  void AddNew(const Add& add) {
    std::shared_ptr<void> replaced;  // freed without the lock
    std::lock_guard lock(mutex_);
    replaced = add();
    ApplyLocked();
  }

  // Makes the kernels of groups that have failed give up.
  void Apply() {
    AddNew([] { return nullptr; });
  }

  bool OnGpu() const override { return true; }

  void SetAbsent(const AbsentDevices& absent) override {
    std::lock_guard lock(mutex_);
    absent_ = absent;
    ApplyLocked();
  }

  // A kernel that has waited for a second writes that again and again, while it waits.
  std::vector<Wait> Look(Clock::time_point now, Clock::duration) override {
    std::lock_guard lock(mutex_);
    std::vector<Wait> waits;
    std::map<const volatile v1::PeerRecord*, Seen> seen;
    ForEachPlace([&](const Place& place) {
      const uint64_t word = place.record->wait;
      const auto known = seen_.find(place.record);
      const bool is_new = known == seen_.end() || known->second.word != word;
      const Clock::time_point changed = is_new ? now : known->second.changed;
      seen[place.record] = {word, changed};
      const LongWait kernel = UnpackWait(word);
      if (word == 0 || now - changed > kWaitIsOver) return;
      Wait& wait = waits.emplace_back(Wait{CallAt(place, kernel.missing, kernel.site)});
      wait.present = 1u << place.call.rank;
      wait.waited = std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(kernel.seconds));
      wait.site_number = Fnv1a(wait.site);
      wait.reported = true;
      if (wait.missing < 0) return;
      const AbsentDevice* const absent = absent_.Find(place.call.device_ids[wait.missing]);
      if (absent && GivesUp(absent->absence(), wait.waited, now - absent->since)) {
        place.communicator.set_failure(place.device, LostText(absent->what, true));
      }
    });
    seen_ = std::move(seen);
    ApplyLocked();
    return waits;
  }

  std::vector<Failure> TakeFailures() override {
    std::lock_guard lock(mutex_);
    std::vector<Failure> failures;
    std::set<const volatile v1::PeerRecord*> taken;
    const auto add = [&](FailureReason reason, Call call) -> Failure& {
      failures.emplace_back(reason, std::move(call)).on_gpu = true;
      return failures.back();
    };
    ForEachPlace([&](const Place& place) {
      const AbsentDevice* const absent = absent_.WorstIn(place.call.device_ids);
      const int gone = absent ? RankOf(*absent, place.call.device_ids) : -1;
      if (std::string why = place.communicator.TakeRefused(place.device); !why.empty()) {
        add(FailureReason::kPeerGone, CallAt(place, gone, 0)).message = std::move(why);
      }
      const auto reason = static_cast<FailureReason>(place.record->reason);
      if (reason == FailureReason::kNone) return;
      taken.insert(place.record);
      if (taken_.contains(place.record)) return;
      Failure& failure = add(reason, CallAt(place, place.record->missing, place.record->site));
      if (place.buffer.empty()) {
        const auto* const record = static_cast<const volatile FailureRecord*>(place.record);
        const auto algorithm = static_cast<Algorithm>(record->algorithm);
        failure.operation = failure.title = OperationName(algorithm);
        if (IsAllReduce(algorithm)) {
          failure.title += std::string(" (") + AlgorithmName(algorithm) + ")";
        }
        if (reason == FailureReason::kOtherOperation) {
          failure.detail = ", which runs " + ToldOperation(record->other);
        }
        if (reason == FailureReason::kBadUpdate) {
          failure.detail = TextOf(const_cast<const FailureRecord*>(record)->fault);
        }
      } else {
        failure.operation = PeerCallName(place.buffer, failure.site);
      }
      if (reason == FailureReason::kAborted && absent) {
        failure.reason = absent->state == PeerState::kSilent ? FailureReason::kPeerStopped
                                                             : FailureReason::kPeerGone;
        failure.missing = gone;  // it may have waited for another
        failure.detail += ", but " + absent->what;
      }
    });
    taken_ = std::move(taken);
    // Those of aborted kernels come last: they don't show which wait failed first.
    std::stable_sort(failures.begin(), failures.end(), [](const Failure& a, const Failure& b) {
      return (a.reason == FailureReason::kAborted) < (b.reason == FailureReason::kAborted);
    });
    return failures;
  }

  uint64_t Calls() override { return device_handler_calls.load(); }

  void LoseDevice(const Failure& failure) override {
    std::lock_guard lock(mutex_);
    const int64_t lost = failure.device_ids[failure.rank];
    ForEachPlace([&](const Place& place) {
      if (place.call.device_ids[place.call.rank] != lost) return;
      place.communicator.set_failure(place.device, failure.message);
    });
    ApplyLocked();
  }

 private:
  // Where kernels of a device write: the record of a communicator, or that of a peer buffer.
  struct Place {
    DeviceCommunicator& communicator;
    int32_t device;                   // its CUDA ordinal
    Call call;                        // what all its calls have in common
    volatile v1::PeerRecord* record;  // of a communicator: a FailureRecord
    std::string buffer;               // the name of a peer buffer; empty for a communicator
  };
  struct Seen {
    uint64_t word;
    Clock::time_point changed;
  };

  // `missing` may be any number: the kernel of a user has written it.
  static Call CallAt(const Place& place, int missing, uint32_t site) {
    Call call = place.call;
    call.missing = static_cast<size_t>(missing) < call.device_ids.size() ? missing : -1;
    call.site = CallSites::Get().SiteOf(site);
    call.shared = CallSites::Get().IsShared(call.site);
    return call;
  }

  // The rank of an absent device in a group that has it.
  int RankOf(const AbsentDevice& absent, const std::vector<int64_t>& group) const {
    const auto found = std::find_if(group.begin(), group.end(), [&](int64_t device) {
      return absent_.Find(device) == &absent;
    });
    return static_cast<int>(found - group.begin());
  }

  // Calls `act(place)` for all places. None of their memory is freed meanwhile (registry.h).
  template <class Act>
  static void ForEachPlace(const Act& act) {
    const auto visit = [&](DeviceCommunicator& communicator, int64_t device,
                           const std::string& name, const auto& group, v1::PeerRecord* record,
                           const std::string& buffer) {
      Place place{communicator, static_cast<int32_t>(device), {}, record, buffer};
      place.call.device_ids = communicator.members.at(place.device).device_ids;
      place.call.group = Fnv1a(name);
      place.call.rank = group.rank;
      place.call.limit_s = group.timeout_ns / 1e9;
      act(place);
    };
    Registry<DeviceCommunicator>::Get().ForEachAlive(
        [&](const Partition& partition, DeviceCommunicator& communicator) {
          const std::string name = ToString(partition);
          for (const auto& [device, member] : communicator.members) {
            visit(communicator, device, name, member.group, member.group.failure, "");
          }
        });
    DevicePeerBuffers::Get().ForEachAlive([&](const std::string& name, DevicePeerBuffer& buffer) {
      for (const auto& [device, peers] : buffer.members) {
        visit(*buffer.communicator, device, ToString(buffer.partition), peers, peers.record, name);
      }
    });
  }

  // What follows from the set of absent devices: which groups have failed, and where kernels that
  // wait give up. A kernel looks at the word at most every 10 ms, and only when it waits: those
  // that have all data end in order.
  void ApplyLocked() {
    ForEachPlace([&](const Place& place) {
      const AbsentDevice* const absent = absent_.WorstIn(place.call.device_ids);
      if (absent && absent->absence() == Absence::kFault) {
        place.communicator.set_failure(place.device, LostText(absent->what, true));
      } else if (absent && Refuses(absent->absence())) {
        place.communicator.set_left(place.device, LostText(absent->what, true));
      }
      place.record->abort = !place.communicator.failure(place.device).empty();
    });
  }

  std::mutex mutex_;
  AbsentDevices absent_;
  std::map<const volatile v1::PeerRecord*, Seen> seen_;
  std::set<const volatile v1::PeerRecord*> taken_;
};

}  // namespace jax_intranode
