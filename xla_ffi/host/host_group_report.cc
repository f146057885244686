// What the groups of CPU devices tell the monitor (health/monitor.h) of their calls, and what it
// tells them.
#include <algorithm>
#include <utility>

#include "../health/call_sites.h"
#include "host_group.h"

namespace jax_intranode {

std::string HostGroup::OperationOf(const Pending& pending) {
  const std::shared_ptr<HostBody>& body = pending.members.begin()->second.body;
  return body ? body->name() : OperationName(pending.operation.algorithm);
}

// What a rank waits in. `key` and `pending` are those of the call.
Wait HostGroup::WaitOf(int rank, const Key& key, const Pending& pending,
                       Clock::time_point now) const {
  Wait wait;
  wait.device_ids = device_ids_;
  wait.rank = rank;
  wait.waited = now - pending.since;
  wait.site_number = key.site;
  wait.count = key.count;
  wait.operation = OperationOf(pending);
  wait.bytes = pending.bytes;
  wait.site = CallSites::Get().SiteOf(pending.name);
  wait.shared = CallSites::Get().IsShared(wait.site);
  wait.calls = pending.calls;
  wait.limit_s = std::chrono::duration<double>(timeout_).count();
  for (const auto& [present, member] : pending.members) wait.present |= 1u << present;
  wait.missing = active_ ? missing_ : std::max(missing_, 0);
  wait.detail = ", whose process has not begun it";
  if (pending.members.size() < local_ranks_.size()) {
    for (int local : local_ranks_) {
      if (!pending.members.contains(local)) wait.missing = local;
    }
    wait.detail =
        ", which has not called it (with jaxlib 0.10, CPU devices of one process hang when more "
        "than 32 programs are in flight: call jax.block_until_ready more often)";
  } else if (active_ && key == current_) {
    wait.detail = ", whose data has not arrived";
  } else if (current_ != Key{}) {
    // A rank of this process is missing in the call that comes next. Rank 0 waits in that call.
    if (wait.missing == rank) wait.missing = 0;
    wait.detail = ", which has not finished a call that rank 0 made before this one";
  }
  return wait;
}

void HostGroup::Look(Clock::time_point now, Clock::duration stopped, std::vector<Wait>* waits) {
  Tickets done;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, pending] : pending_) pending.since += stopped;
    Advance(&done);
    const auto older = [](const auto* a, const auto* b) {
      return b == nullptr || a->second.since < b->second.since;
    };
    const Calls::value_type* oldest = nullptr;
    for (const auto& call : pending_) oldest = older(&call, oldest) ? &call : oldest;
    // What a rank sent before it went was there before: it would have been found.
    const AbsentDevice* const absent = missing_ < 0 ? nullptr : absent_.Find(device_ids_[missing_]);
    if (oldest != nullptr && absent != nullptr &&
        GivesUp(absent->absence(), now - oldest->second.since, now - absent->since)) {
      LoseRank(missing_, *absent, &done);
    }
    for (const int rank : local_ranks_) {
      const Calls::value_type* mine = nullptr;
      for (const auto& call : pending_) {
        if (call.second.members.contains(rank) && older(&call, mine)) mine = &call;
      }
      if (mine == nullptr) continue;
      waits->push_back(WaitOf(rank, mine->first, mine->second, now));
      Wait& wait = waits->back();
      wait.reported = mine == oldest && rank == oldest->second.members.begin()->first;
      wait.has_called = [this, rank, alive = shared_from_this()](uint64_t site, uint64_t count) {
        std::lock_guard lock(mutex_);
        const auto calls = counts_.find({site, rank});
        return calls != counts_.end() && calls->second > count;
      };
      wait.give_up = [alive = shared_from_this(), key = mine->first](Failure failure) {
        alive->GiveUp(key, std::move(failure));
      };
    }
  }
  CompleteAll(done);
}

// Ends a call that has waited for too long, unless it has ended.
void HostGroup::GiveUp(const Key& key, Failure failure) {
  Tickets done;
  {
    std::lock_guard lock(mutex_);
    if (!pending_.contains(key)) return;
    FailCall(std::move(failure), &done);
  }
  CompleteAll(done);
}

std::vector<Failure> HostGroup::TakeFailures() {
  std::lock_guard lock(mutex_);
  return std::exchange(failures_, {});
}

void HostGroup::Fail(const std::string& error) {
  Tickets done;
  {
    std::lock_guard lock(mutex_);
    FailLocked(error, &done);
  }
  CompleteAll(done);
}

void HostGroup::SetAbsent(const AbsentDevices& absent) {
  Tickets done;
  {
    std::lock_guard lock(mutex_);
    Advance(&done);  // what a rank sent before it went has arrived
    absent_ = absent;
    for (size_t rank = 0; rank < device_ids_.size() && failure_.empty(); ++rank) {
      const AbsentDevice* const lost = absent.Find(device_ids_[rank]);
      if (lost == nullptr || lost->absence() != Absence::kFault) continue;
      LoseRank(static_cast<int>(rank), *lost, &done);
    }
  }
  CompleteAll(done);
}

// Fails the group because the process of `rank` is absent.
void HostGroup::LoseRank(int rank, const AbsentDevice& absent, Tickets* done) {
  const auto waiting = active_ ? pending_.find(current_) : pending_.begin();
  if (waiting == pending_.end()) {
    FailLocked(LostText(absent.what, false), done);
    return;
  }
  Failure failure(
      absent.state == PeerState::kSilent ? FailureReason::kPeerStopped : FailureReason::kPeerGone,
      WaitOf(waiting->second.members.begin()->first, waiting->first, waiting->second, {}));
  failure.missing = rank;
  failure.detail = ", but " + absent.what;
  FailCall(std::move(failure), done);
}

// Fails the group because a call of it has failed.
void HostGroup::FailCall(Failure failure, Tickets* done) {
  failure.message = TextOf(failure);
  FailLocked(failure.message, done);
  failures_.push_back(std::move(failure));
}

void HostGroup::FailLocked(const std::string& error, Tickets* done) {
  if (failure_.empty()) failure_ = error;
  for (auto& [key, pending] : pending_) {
    for (auto& [rank, member] : pending.members) {
      const auto complete = [ticket = member.ticket, error = failure_] { ticket->Complete(error); };
      // A body that runs still uses the buffers of its call.
      if (member.body && !member.body->Stop(complete)) continue;
      done->emplace_back(member.ticket, failure_);
    }
  }
  pending_.clear();
  to_log_.clear();
  active_ = false;
}

void HostGroup::CompleteAll(const Tickets& tickets) {
  for (const auto& [ticket, error] : tickets) ticket->Complete(error);
}

std::string HostGroup::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace jax_intranode
