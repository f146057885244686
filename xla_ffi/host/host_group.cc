#include "host_group.h"

#include <algorithm>
#include <utility>

#include "../kernels/permute.h"
#include "../kernels/segments.h"
#include "progress.h"

namespace jax_intranode {

std::atomic<uint64_t> host_operations{0};

HostGroup::HostGroup(const Group& group, std::vector<int> local_ranks,
                     std::vector<int64_t> device_ids, std::chrono::nanoseconds timeout,
                     std::shared_ptr<void> keep_alive)
    : group_(group),
      local_ranks_(std::move(local_ranks)),
      device_ids_(std::move(device_ids)),
      timeout_(timeout),
      keep_alive_(std::move(keep_alive)),
      log_(group_.region[0] + kHeaderBytes / 2) {
  Group own = group_;
  own.rank = local_ranks_.front();
  for (int rank = 0; rank < group_.size; ++rank) {
    Group view = group_;
    view.rank = rank;
    views_.push_back(view);
  }
  logged_ = sequence_ = epoch_ = Load(&own.Header()->epoch[0]);
}

std::shared_ptr<Ticket> HostGroup::Arrive(int rank, uint64_t site, std::shared_ptr<HostBody> body) {
  Member member;
  member.body = std::move(body);
  return Arrive(rank, site, Operation{}, std::move(member));
}

std::shared_ptr<Ticket> HostGroup::Arrive(int rank, uint64_t site, const Operation& operation,
                                          Member member) {
  auto ticket = std::make_shared<Ticket>();
  {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) {
      ticket->Complete(failure_);
      return ticket;
    }
    const Key key{site, counts_[{site, rank}]++};
    auto [it, first] = pending_.try_emplace(key);
    Pending& pending = it->second;
    const uint64_t name = operation.name != 0 ? operation.name : site;
    const uint32_t calls = calls_[{name, rank}]++;
    if (first) {
      pending.name = name;
      pending.calls = calls;
      pending.operation = operation;
      pending.bytes = member.body ? 0 : member.call.Bytes(group_.size);
      pending.since = std::chrono::steady_clock::now();
    }
    member.ticket = ticket;
    pending.members.emplace(rank, std::move(member));
    if (IsLeader() && pending.members.size() == local_ranks_.size()) {
      to_log_.push_back(key);
      AppendToLog();
    }
  }
  Progress();
  return ticket;
}

// The first call whose entry a process may not have read yet, and a rank of that process.
std::pair<uint32_t, int> HostGroup::LastRead() const {
  std::pair<uint32_t, int> last{sequence_, 0};
  if (to_log_.empty() || !HasOwnRegion(pending_.at(to_log_.front()).operation.algorithm)) {
    return last;
  }
  for (int r = 1; r < group_.size; ++r) {
    const uint32_t begun = LoadAcquire(BegunOf(views_[0], r, 0));
    if (static_cast<int32_t>(begun - last.first) < 0) last = {begun, r};
  }
  return last;
}

void HostGroup::AppendToLog() {
  while (!to_log_.empty() && Log::HasRoom(logged_, LastRead().first)) {
    const Key key = to_log_.front();
    to_log_.pop_front();
    log_.Append(logged_++, {key.site, key.count});
  }
}

// Whether the log names the next call and all ranks of this process have arrived at it.
bool HostGroup::FindNext() {
  const auto call = log_.Read(sequence_);
  if (!call) {
    missing_ = LastRead().second;
    current_ = {};
    return false;
  }
  current_ = {call->site, call->count};
  auto it = pending_.find(current_);
  for (int rank : local_ranks_) {
    if (it == pending_.end() || !it->second.members.contains(rank)) {
      missing_ = rank;
      return false;
    }
  }
  return true;
}

// Starts a body that has not begun; returns whether it has ended.
bool HostGroup::AdvanceBody(HostBody& body) {
  if (!body.started()) body.Start([group = shared_from_this()] { group->Progress(); });
  if (body.ended()) return true;
  const int missing = body.missing();
  missing_ = static_cast<size_t>(missing) < device_ids_.size() ? missing : -1;
  return false;
}

// Advances each rank as far as possible; returns whether all have finished.
bool HostGroup::Advance(Pending& pending) {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [rank, member] : pending.members) {
      if (member.finished) continue;
      if (member.body) {
        member.finished = AdvanceBody(*member.body);
        continue;
      }
      const uint32_t step = member.call.step();
      member.finished = member.call.Advance(views_[rank], epoch_, &missing_);
      if (member.call.step() == step) continue;
      moved = true;
      // Each segment is waited for by itself: an operation of many may take long.
      const Operation& operation = pending.operation;
      if (operation.segments > 1 || RunsInWindows(operation.algorithm)) {
        pending.since = std::chrono::steady_clock::now();
      }
    }
  }
  return std::all_of(pending.members.begin(), pending.members.end(),
                     [](const auto& m) { return m.second.finished; });
}

void HostGroup::Progress() {
  Tickets done;
  {
    // A thread that doesn't get the lock need not wait: the holder advances the operations.
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return;
    Advance(&done);
  }
  CompleteAll(done);
}

void HostGroup::Advance(Tickets* done) {
  while (failure_.empty() && !pending_.empty()) {
    if (IsLeader()) AppendToLog();
    if (!active_) active_ = FindNext();
    if (!active_ || !Advance(pending_.at(current_))) return;
    auto it = pending_.find(current_);
    for (auto& [rank, member] : it->second.members) {
      std::string error = member.call.error();
      if (!error.empty()) {
        const std::string name = WaitOf(rank, it->first, it->second, {}).Name();
        error = "jax_intranode: " + name + " failed: " + error + ".";
      }
      done->emplace_back(member.ticket, std::move(error));
    }
    const bool has_bodies = it->second.members.begin()->second.body != nullptr;
    const Operation& operation = it->second.operation;
    const uint32_t epochs =
        has_bodies ? 0 : Epochs(PhasesOf(operation.algorithm), operation.segments);
    // Calls on peer buffers don't count: on GPUs nobody sees them.
    if (!has_bodies) host_operations += it->second.members.size();
    pending_.erase(it);
    active_ = false;
    // Orders this operation's arming before the next one's packets, as the end of a kernel does
    // on a GPU (group.h).
    Fence();
    ++sequence_;
    epoch_ += epochs;
  }
}

void HostGroup::KeepMoving() {
  {
    std::lock_guard lock(mutex_);
    if (watched_) return;
    watched_ = true;
  }
  Watch(weak_from_this());
}

bool HostGroup::IsOutstanding() {
  std::lock_guard lock(mutex_);
  return watched_ = !pending_.empty();
}

}  // namespace jax_intranode
