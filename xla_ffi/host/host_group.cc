#include "host_group.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <type_traits>
#include <utility>

#include "../kernels/all_gather.h"
#include "../kernels/all_to_all.h"
#include "../kernels/hybrid_cube_mesh.h"
#include "../kernels/norm_protocol.h"
#include "../kernels/one_shot.h"
#include "../kernels/reduce_scatter.h"
#include "../kernels/segments.h"
#include "../kernels/two_shot.h"
#include "call_sites.h"
#include "progress.h"

namespace jax_intranode {
namespace {

// The thread context of group.h for a caller that must not block. One thread works on all packs of
// a rank. A wait ends the phase, which resumes later at the same pack.
struct ResumableThread {
  size_t* cursor;
  int* missing;
  size_t First() const { return std::exchange(*cursor, 0); }
  size_t Stride() const { return 1; }
  // For norms (kernels/norm_protocol.h).
  static constexpr int kRowThreads = 1;
  uint32_t Thread() const { return 0; }
  uint32_t Threads() const { return 1; }
  int Block() const { return 0; }
  int Blocks() const { return 1; }
  size_t FirstUnit() const { return First(); }
  template <uint32_t kMost>
  float Total(float (&v)[kMost], uint32_t count) const {
    return TotalOfPairs(v, count);
  }
  bool Wait(size_t i, int rank) {
    *cursor = i;
    *missing = rank;
    return false;
  }
  // Nothing to check: a group begins one operation at a time, and handlers refuse closed groups.
  void Admit() const {}
  void FenceSegment() const { Fence(); }
};

// XLA:CPU calls handlers with flush-to-zero switched on. Sums keep subnormals.
class KeepSubnormals {
 public:
  KeepSubnormals() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~KeepSubnormals() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

// Runs a call from step `*step` on as far as possible; returns whether it has ended.
template <class Type, int N, class C>
bool RunCall(Algorithm algorithm, ResumableThread& t, const Group& g, const InSegments<C>& c,
             uint32_t epoch, uint32_t* step) {
  switch (algorithm) {
    case Algorithm::kOneShot:
      return RunSteps<OneShot<Type, N>>(t, g, c, epoch, step);
    case Algorithm::kTwoShot:
      return RunSteps<TwoShot<Type, N>>(t, g, c, epoch, step);
    case Algorithm::kHybridCubeMesh:
      return RunSteps<HybridCubeMesh<Type, N == kMaxRanks ? N : 0>>(t, g, c, epoch, step);
    default:
      break;
  }
  // CollectBuffers (ffi/common.h) allows only one buffer for these three.
  if constexpr (std::is_same_v<C, Buffer>) {
    switch (algorithm) {
      case Algorithm::kReduceScatter:
        return RunSteps<ReduceScatter<Type, N>>(t, g, c, epoch, step);
      case Algorithm::kAllGather:
        return RunSteps<AllGather<Type, N>>(t, g, c, epoch, step);
      case Algorithm::kAllToAll:
        return RunSteps<AllToAll<Type, N>>(t, g, c, epoch, step);
      default:
        break;
    }
  }
  return true;  // matmuls run only on GPUs
}

template <class Type>
bool RunCall(Algorithm algorithm, ResumableThread& t, const Group& g, const InSegments<Buffer>& c,
             uint32_t epoch, uint32_t* step) {
  switch (g.size) {
    case 2:
      return RunCall<Type, 2>(algorithm, t, g, c, epoch, step);
    case 4:
      return RunCall<Type, 4>(algorithm, t, g, c, epoch, step);
    case 8:
      return RunCall<Type, 8>(algorithm, t, g, c, epoch, step);
    default:
      return RunCall<Type, 0>(algorithm, t, g, c, epoch, step);
  }
}

template <class Type>
bool RunCall(Algorithm algorithm, ResumableThread& t, const Group& g, const InSegments<Buffers>& c,
             uint32_t epoch, uint32_t* step) {
  return RunCall<Type, 0>(algorithm, t, g, c, epoch, step);
}

// The element types of a norm are fewer (HasNorm).
template <class Type>
bool RunCall(Algorithm, ResumableThread& t, const Group& g, const NormCall& c, uint32_t epoch,
             uint32_t* phase) {
  if constexpr (Type::Packets::kBytes == sizeof(Pack)) {
    using Body = Norm<Type, 0, false>;
    for (; *phase < Body::kPhases; ++*phase) {
      if (!Body::RunPhase(*phase, t, g, c, epoch)) return false;
    }
  }
  return true;
}

template <class C>
bool RunCall(ElementType type, Algorithm algorithm, ResumableThread& t, const Group& g, const C& c,
             uint32_t epoch, uint32_t* step) {
  switch (type) {
#define JIN_X(type, item_bytes, packet_bytes) \
  case ElementType::k##type:                  \
    return RunCall<type>(algorithm, t, g, c, epoch, step);
    JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X
  }
  return true;
}

}  // namespace

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

HostGroup::HostGroup(const Group& group, std::vector<int> local_ranks,
                     std::vector<int64_t> device_ids, std::chrono::nanoseconds timeout,
                     std::shared_ptr<void> keep_alive, const std::vector<Links>& links)
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
    if (!links.empty()) view.links = links.at(rank);
    view.KeepLinked();
    views_.push_back(view);
  }
  logged_ = sequence_ = epoch_ = Load(&own.Header()->epoch[0]);
}

std::shared_ptr<Ticket> HostGroup::Arrive(int rank, uint64_t site, const Operation& operation,
                                          const Buffers& buffers) {
  uint64_t bytes = 0;
  for (int b = 0; b < buffers.count; ++b) {
    bytes += buffers.buffer[b].bytes * InputShards(operation.algorithm, group_.size);
  }
  Member member{.buffer = buffers.buffer[0]};
  if (buffers.count > 1) member.buffers = std::make_unique<const Buffers>(buffers);
  return Arrive(rank, site, operation, bytes, std::move(member));
}

std::shared_ptr<Ticket> HostGroup::Arrive(int rank, uint64_t site, const Operation& operation,
                                          const NormCall& call) {
  const uint64_t bytes = uint64_t{call.rows} * call.hidden * ItemBytes(operation.type) *
                         InputShards(operation.algorithm, group_.size);
  Member member;
  member.norm = std::make_unique<const NormCall>(call);
  return Arrive(rank, site, operation, bytes, std::move(member));
}

std::shared_ptr<Ticket> HostGroup::Arrive(int rank, uint64_t site, std::shared_ptr<HostBody> body) {
  Member member;
  member.body = std::move(body);
  return Arrive(rank, site, Operation{}, 0, std::move(member));
}

std::shared_ptr<Ticket> HostGroup::Arrive(int rank, uint64_t site, const Operation& operation,
                                          uint64_t bytes, Member member) {
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
      pending.bytes = bytes;
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

void HostGroup::AppendToLog() {
  while (!to_log_.empty() && Log::HasRoom(logged_, sequence_)) {
    const Key key = to_log_.front();
    to_log_.pop_front();
    log_.Append(logged_++, {key.site, key.count});
  }
}

// Whether the log names the next call and all ranks of this process have arrived at it.
bool HostGroup::FindNext() {
  const auto call = log_.Read(sequence_);
  if (!call) {
    missing_ = 0;
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

// Runs a rank's call as far as possible; returns whether it has ended.
bool HostGroup::AdvanceCall(int rank, const Operation& operation, Member& member) {
  const auto& [algorithm, type, segments, name] = operation;
  const Group& group = views_[rank];
  ResumableThread thread{&member.cursor, &missing_};
  const auto run = [&](const auto& call) {
    return RunCall(type, algorithm, thread, group, call, epoch_, &member.step);
  };
  if (member.norm) return run(*member.norm);
  const auto run_cut = [&](const auto& call) {
    const size_t packs = SegmentPacks(algorithm, call.Packs(), group.size, segments);
    return run(InSegments<std::decay_t<decltype(call)>>{call, packs, segments});
  };
  return member.buffers ? run_cut(*member.buffers) : run_cut(member.buffer);
}

// Starts a body that has not begun; returns whether it has ended.
bool HostGroup::AdvanceBody(HostBody& body) {
  if (!body.started()) body.Start([group = shared_from_this()] { group->Progress(); });
  if (body.ended()) return true;
  missing_ = body.missing();
  return false;
}

// Advances each rank as far as possible; returns whether all have finished.
bool HostGroup::Advance(Pending& pending) {
  KeepSubnormals keep_subnormals;
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [rank, member] : pending.members) {
      if (member.finished) continue;
      if (member.body) {
        member.finished = AdvanceBody(*member.body);
        continue;
      }
      const uint32_t step = member.step;
      member.finished = AdvanceCall(rank, pending.operation, member);
      if (member.step == step) continue;
      moved = true;
      // Each segment is waited for by itself: an operation of many may take long.
      if (pending.operation.segments > 1) pending.since = std::chrono::steady_clock::now();
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
    if (!active_) active_ = FindNext();
    if (!active_ || !Advance(pending_.at(current_))) return;
    auto it = pending_.find(current_);
    for (auto& [rank, member] : it->second.members) done->emplace_back(member.ticket, "");
    const bool has_bodies = it->second.members.begin()->second.body != nullptr;
    const Operation& operation = it->second.operation;
    const uint32_t epochs =
        has_bodies ? 0 : Epochs(PhasesOf(operation.algorithm), operation.segments);
    // Calls on peer buffers don't count: on GPUs nobody sees them.
    if (!has_bodies) operations_ += it->second.members.size();
    pending_.erase(it);
    active_ = false;
    // Orders this operation's arming before the next one's packets, as the end of a kernel does
    // on a GPU (group.h).
    Fence();
    ++sequence_;
    epoch_ += epochs;
    if (IsLeader()) AppendToLog();
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

std::string HostGroup::OperationOf(const Pending& pending) {
  const std::shared_ptr<HostBody>& body = pending.members.begin()->second.body;
  return body ? body->name() : OperationName(pending.operation.algorithm);
}

bool HostGroup::IsOutstanding() {
  std::lock_guard lock(mutex_);
  return watched_ = !pending_.empty();
}

bool HostGroup::HasCalled(int rank, uint64_t site, uint64_t count) const {
  std::lock_guard lock(mutex_);
  const auto calls = counts_.find({site, rank});
  return calls != counts_.end() && calls->second > count;
}

// What a rank waits in. `key` and `pending` are those of the call.
Wait HostGroup::WaitOf(int rank, const Key& key, const Pending& pending,
                       Clock::time_point now) const {
  Wait wait;
  wait.owner = shared_from_this();
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
  wait.missing = std::max(missing_, 0);
  wait.detail = ", whose process has not begun it";
  if (pending.members.size() < local_ranks_.size()) {
    for (int local : local_ranks_) {
      if (!pending.members.contains(local)) wait.missing = local;
    }
    wait.detail = ", which has not called it";
  } else if (active_ && key == current_) {
    wait.detail = ", and a part of its data has not arrived";
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
    if (const auto absent = absent_.find(missing_); oldest != nullptr && absent != absent_.end()) {
      const auto& [absence, state, since, what] = absent->second;
      if (GivesUp(absence, now - oldest->second.since, now - since)) LoseRank(missing_, &done);
    }
    for (const int rank : local_ranks_) {
      const Calls::value_type* mine = nullptr;
      for (const auto& call : pending_) {
        if (call.second.members.contains(rank) && older(&call, mine)) mine = &call;
      }
      if (mine == nullptr) continue;
      waits->push_back(WaitOf(rank, mine->first, mine->second, now));
      waits->back().reported = mine == oldest && rank == oldest->second.members.begin()->first;
    }
  }
  CompleteAll(done);
}

void HostGroup::GiveUp(const Wait& wait, Failure failure) {
  Tickets done;
  {
    std::lock_guard lock(mutex_);
    if (!pending_.contains({wait.site_number, static_cast<uint32_t>(wait.count)})) return;
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
    absent_.clear();
    for (size_t rank = 0; rank < device_ids_.size(); ++rank) {
      const AbsentDevice* const device = absent.Find(device_ids_[rank]);
      if (device != nullptr) absent_[static_cast<int>(rank)] = *device;
    }
    for (const auto& [rank, device] : absent_) {
      if (device.absence == Absence::kFault && failure_.empty()) LoseRank(rank, &done);
    }
  }
  CompleteAll(done);
}

// Fails the group because the process of `rank` is absent.
void HostGroup::LoseRank(int rank, Tickets* done) {
  const AbsentDevice& absent = absent_.at(rank);
  const auto waiting = active_ ? pending_.find(current_) : pending_.begin();
  if (waiting == pending_.end()) {
    FailLocked(LostText(absent.what, false), done);
    return;
  }
  const Wait wait =
      WaitOf(waiting->second.members.begin()->first, waiting->first, waiting->second, {});
  Failure failure = FailureOf(wait, absent.state == PeerState::kSilent ? FailureReason::kPeerStopped
                                                                       : FailureReason::kPeerGone);
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

uint64_t HostGroup::operations() const {
  std::lock_guard lock(mutex_);
  return operations_;
}

}  // namespace jax_intranode
