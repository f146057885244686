// A group of CPU ranks. It runs the protocols of xla_ffi/kernels and never blocks a caller.
//
// XLA:CPU starts independent calls in a different order on each device, several at once, in a pool
// of few threads. A call that waited in its thread for its peers could deadlock. So a call only
// arrives here and returns a ticket. Calls are matched by call site and count, never by the order
// of arrival. They run one at a time, in an order that the process of rank 0 (the leader) decides:
// it logs each call, in rank 0's region, once all of its own ranks have arrived at it. The other
// processes follow the log. So each call is the next operation of the group, with the same epoch on
// every rank, as on a GPU's stream.
//
// Why one group can't deadlock: when the leader logs a call, its ranks have the operands of that
// call. All ranks run the same program, so another process that still computes the operands of the
// logged call does not depend on calls that come later in the log.
// What the argument does not cover: operands that come from calls of other groups, whose leaders
// may have logged them in another order. Two independent chains, one over rows and then columns,
// the other over columns and then rows, can wait for each other in a circle of four processes. The
// time-out ends that.
//
// Ranks that run different operations never exchange data, because the identity of a call site
// holds the operation, the types and the groups. They wait. The monitor (health/monitor.h) reports
// calls that have waited for long, and ends them at their limit.
//
// Calls on peer buffers (host_body.h) take part in the same order. Their functions may block, so
// each runs in a thread of its own. When the operation before has ended, those of this process
// start together. They take no epoch, because they do not use the region. In such threads
// collectives of 1 KB would take 2.5 times as long (docs/measurements/experiments.md).
//
// engine.h runs the protocols. call_log.h has the log. host_group_report.cc says what calls wait
// for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../health/platform.h"
#include "../kernels/group.h"
#include "call_log.h"
#include "engine.h"
#include "host_body.h"
#include "ticket.h"

namespace jax_intranode {

// Operations that the devices of this process have executed.
extern std::atomic<uint64_t> host_operations;

class HostGroup : public std::enable_shared_from_this<HostGroup> {
 public:
  using Operation = HostOperation;

  // `group.region` holds every rank's region; `group.rank` is ignored. `local_ranks` are the ranks
  // of this process. `device_ids` name the ranks in messages. `keep_alive` owns the memory. The
  // first operation has the epoch in the headers, which must be the same in all of them: 0 in a new
  // slab.
  HostGroup(const Group& group, std::vector<int> local_ranks, std::vector<int64_t> device_ids,
            std::chrono::nanoseconds timeout, std::shared_ptr<void> keep_alive);

  // Rank `rank` arrives at call site `site`. The memory that the buffers point to must stay valid
  // until the ticket is complete.
  template <class Call>  // those that a ResumableCall takes
  std::shared_ptr<Ticket> Arrive(int rank, uint64_t site, const Operation& operation,
                                 const Call& call) {
    return Arrive(rank, site, operation, Member{.call = ResumableCall(operation, call)});
  }

  // The same for a call on a peer buffer. What the body uses must stay valid until the ticket is
  // complete.
  std::shared_ptr<Ticket> Arrive(int rank, uint64_t site, std::shared_ptr<HostBody> body);

  // Advances the operations as far as possible and returns at once. Any thread may call it.
  void Progress();

  // Makes the progress thread advance the calls that are outstanding now.
  void KeepMoving();

  // Whether calls are outstanding. If not, the progress thread forgets the group.
  bool IsOutstanding();

  // For the monitor; see health/platform.h. Appends what each rank of this process waits in.
  void Look(Clock::time_point now, Clock::duration stopped, std::vector<Wait>* waits);
  void SetAbsent(const AbsentDevices& absent);
  // The failures that this has not returned before.
  std::vector<Failure> TakeFailures();

  // Ends every outstanding and later call with `error`.
  void Fail(const std::string& error);

  // Why the group has failed; empty if it hasn't.
  std::string failure() const;

  size_t epoch_buffer_bytes() const { return group_.epoch_buffer_bytes; }
  int size() const { return group_.size; }

 private:
  using Log = CallLog<1024>;
  static_assert(sizeof(Log::Entry) * 1024 <= kHeaderBytes / 2);
  struct Key {
    uint64_t site;
    uint32_t count;
    auto operator<=>(const Key&) const = default;
  };
  struct Member {
    ResumableCall call;
    std::shared_ptr<HostBody> body;  // of a call on a peer buffer
    std::shared_ptr<Ticket> ticket;
    bool finished = false;
  };
  struct Pending {
    Operation operation;
    uint64_t bytes;                 // of a rank's operand
    uint64_t name;                  // of the call site, for messages
    uint32_t calls;                 // how often it had been called before
    std::map<int, Member> members;  // by rank
    Clock::time_point since;        // the first arrival, or the end of a segment
  };
  using Calls = std::map<Key, Pending>;
  using Tickets = std::vector<std::pair<std::shared_ptr<Ticket>, std::string>>;

  std::shared_ptr<Ticket> Arrive(int rank, uint64_t site, const Operation& operation,
                                 Member member);
  bool IsLeader() const { return local_ranks_.front() == 0; }
  std::pair<uint32_t, int> LastRead() const;
  void AppendToLog();
  bool FindNext();
  bool Advance(Pending& pending);
  bool AdvanceBody(HostBody& body);
  void Advance(Tickets* done);
  static std::string OperationOf(const Pending& pending);
  Wait WaitOf(int rank, const Key& key, const Pending& pending, Clock::time_point now) const;
  void GiveUp(const Key& key, Failure failure);
  void FailLocked(const std::string& error, Tickets* done);
  void FailCall(Failure failure, Tickets* done);
  void LoseRank(int rank, const AbsentDevice& absent, Tickets* done);
  static void CompleteAll(const Tickets& tickets);

  const Group group_;
  std::vector<Group> views_;  // each rank's: its number
  const std::vector<int> local_ranks_;
  const std::vector<int64_t> device_ids_;
  const std::chrono::nanoseconds timeout_;
  const std::shared_ptr<void> keep_alive_;
  Log log_;

  mutable std::mutex mutex_;
  Calls pending_;
  std::map<std::pair<uint64_t, int>, uint32_t> counts_;  // calls so far by site and rank
  std::map<std::pair<uint64_t, int>, uint32_t> calls_;   // the same by the site's name
  std::deque<Key> to_log_;  // the leader's complete calls that await a log entry
  uint32_t logged_;         // the number of the leader's next entry
  uint32_t sequence_;       // the number of the next call
  uint32_t epoch_;          // the first epoch of the next call
  bool watched_ = false;    // whether the progress thread has this group on its list
  bool active_ = false;     // whether call `sequence_` has begun
  Key current_{};
  int missing_ = -1;               // the rank for which `current_` waits
  AbsentDevices absent_;           // of all groups
  std::vector<Failure> failures_;  // that nobody has taken
  std::string failure_;
};

}  // namespace jax_intranode
