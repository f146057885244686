// The communicators and peer buffers on the GPUs of this process, as the monitor sees them
// (health/monitor.h). It reads what kernels write to host memory (cuda/failure.h), and sets the
// word that tells them to give up. Nothing here calls CUDA.
#pragma once

#include <algorithm>
#include <chrono>
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
#include "peer_cuda.h"
#include "site_numbers.h"

namespace jax_intranode {

class CudaPlatform final : public Platform {
 public:
  static CudaPlatform& Get() {
    static CudaPlatform* const platform = new CudaPlatform;
    return *platform;
  }

  // Something is new: a communicator, or a peer buffer.
  template <class Add>
  void AddNew(const Add& add) {
    std::lock_guard lock(mutex_);
    add();
    Apply();
  }

  bool OnGpu() const override { return true; }

  void SetAbsent(const AbsentDevices& absent) override {
    std::lock_guard lock(mutex_);
    absent_ = absent;
    Apply();
  }

  // A kernel that has waited for a second writes that again and again, while it waits.
  std::vector<Wait> Look(Clock::time_point now, Clock::duration) override {
    std::lock_guard lock(mutex_);
    std::vector<Wait> waits;
    std::map<const volatile v1::PeerRecord*, Seen> seen;
    for (const Place& place : Places()) {
      const uint64_t word = place.record->wait;
      const auto known = seen_.find(place.record);
      const bool is_new = known == seen_.end() || known->second.word != word;
      const Clock::time_point changed = is_new ? now : known->second.changed;
      seen[place.record] = {word, changed};
      const LongWait kernel = UnpackWait(word);
      if (word == 0 || now - changed > kOver ||
          static_cast<size_t>(kernel.missing) >= place.call.device_ids.size()) {
        continue;
      }
      Wait& wait = waits.emplace_back(Wait{CallAt(place, kernel.missing, kernel.site)});
      wait.present = 1u << place.call.rank;
      wait.waited = std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(kernel.seconds));
      wait.site_number = Fnv1a(wait.site);
      wait.reported = true;
      const AbsentDevice* const absent = absent_.Find(place.call.device_ids[kernel.missing]);
      if (absent && GivesUp(absent->absence(), wait.waited, now - absent->since)) {
        place.communicator->set_failure(LostText(absent->what, true));
      }
    }
    seen_ = std::move(seen);
    Apply();
    return waits;
  }

  std::vector<Failure> TakeFailures() override {
    std::lock_guard lock(mutex_);
    std::vector<Failure> failures;
    const auto add = [&](FailureReason reason, Call call) -> Failure& {
      failures.emplace_back(reason, std::move(call)).on_gpu = true;
      return failures.back();
    };
    for (const Place& place : Places()) {
      if (const auto refused = place.communicator->TakeRefused()) {
        add(FailureReason::kPeerGone, CallAt(place, -1, 0)).message = refused->second;
      }
      const auto reason = static_cast<FailureReason>(place.record->reason);
      if (reason == FailureReason::kNone || !taken_.insert(place.record).second) continue;
      const AbsentDevice* const absent = absent_.WorstIn(place.call.device_ids);
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
      } else {
        failure.operation = PeerCallName(place.buffer, failure.site);
      }
      if (reason == FailureReason::kAborted && absent) {
        failure.reason = absent->state == PeerState::kSilent ? FailureReason::kPeerStopped
                                                             : FailureReason::kPeerGone;
        failure.missing = RankOf(*absent, failure.device_ids);  // it may have waited for another
        failure.detail += ", but " + absent->what;
      }
    }
    // Those of aborted kernels come last: they don't show which wait failed first.
    std::stable_sort(failures.begin(), failures.end(), [](const Failure& a, const Failure& b) {
      return (a.reason == FailureReason::kAborted) < (b.reason == FailureReason::kAborted);
    });
    return failures;
  }

  uint64_t Calls() override { return device_handler_calls.load(); }

  void FailAll(const std::string& message) override {
    std::lock_guard lock(mutex_);
    for (const Place& place : Places()) place.communicator->set_failure(message);
    Apply();
  }

 private:
  // How long after its last word a wait is over. Kernels that wait write every 10 ms.
  static constexpr auto kOver = std::chrono::seconds(1);

  // Where kernels of a device write: the record of a communicator, or that of a peer buffer.
  struct Place {
    std::shared_ptr<DeviceCommunicator> communicator;
    Call call;                        // what all its calls have in common
    volatile v1::PeerRecord* record;  // of a communicator: a FailureRecord
    std::string buffer;               // the name of a peer buffer; empty for a communicator
  };
  struct Seen {
    uint64_t word;
    Clock::time_point changed;
  };

  static Call CallAt(const Place& place, int missing, uint32_t site) {
    Call call = place.call;
    call.missing = missing;
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

  static std::vector<Place> Places() {
    std::vector<Place> places;
    const auto add = [&](const auto& communicator, int64_t device, const std::string& group,
                         int rank, uint64_t timeout_ns, auto* record, const std::string& buffer) {
      Place& place = places.emplace_back(Place{communicator, {}, record, buffer});
      place.call.device_ids = communicator->members.at(device).device_ids;
      place.call.group = Fnv1a(group);
      place.call.rank = rank;
      place.call.limit_s = timeout_ns / 1e9;
    };
    for (const auto& [partition, communicator] : Registry<DeviceCommunicator>::Get().Alive()) {
      const std::string name = ToString(partition);
      for (const auto& [device, member] : communicator->members) {
        const DeviceGroup& group = member.group;
        add(communicator, device, name, group.rank, group.timeout_ns, group.failure, "");
        if (member.beside) {  // may wait for another rank than the group does
          add(communicator, device, name + " beside", group.rank, group.timeout_ns,
              member.beside->failure, "");
        }
      }
    }
    for (const auto& [name, buffer] : DevicePeerBuffers::Get().Alive()) {
      for (const auto& [device, peers] : buffer->members) {
        add(buffer->communicator, device, ToString(buffer->partition), peers.rank, peers.timeout_ns,
            peers.record, name);
      }
    }
    return places;
  }

  // What follows from the set of absent devices: which communicators have failed, and where kernels
  // that wait give up. A kernel looks at the word at most every 10 ms, and only when it waits:
  // those that have all data end in order.
  void Apply() {
    const std::vector<Place> places = Places();
    for (const Place& place : places) {
      const AbsentDevice* const absent = absent_.WorstIn(place.call.device_ids);
      if (absent && absent->absence() == Absence::kFault) {
        place.communicator->set_failure(LostText(absent->what, true));
      } else if (absent && Refuses(absent->absence())) {
        place.communicator->set_left(LostText(absent->what, true));
      }
    }
    for (const Place& place : places) place.record->abort = !place.communicator->failure().empty();
  }

  std::mutex mutex_;
  AbsentDevices absent_;
  std::map<const volatile v1::PeerRecord*, Seen> seen_;
  std::set<const volatile v1::PeerRecord*> taken_;
};

}  // namespace jax_intranode
