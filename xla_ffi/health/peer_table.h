// The state of a peer: what changes it, and what follows from it for calls. This file decides, and
// does no input or output. tests/native/peer_record_test.cc runs it in many orders of events.
//
// What a process knows of a peer is one value. "Ends" is the end of the peer's process.
//
//   state     | heard    | finishes | goes on | leaves   | fails  | ends     | silent for 30 s
//   ----------+----------+----------+---------+----------+--------+----------+----------------
//   unheard   | running  | finished | running | left     | failed | lost     | silent
//   running   | running  | finished | running | left     | failed | lost     | silent
//   silent    | running  | finished | running | left     | failed | lost     | silent
//   finished  | finished | finished | running | finished | failed | finished | finished
//   left      | left in all columns
//   failed    | failed in all columns
//   lost      | lost in all columns
//
//   unheard   it has connected, and nothing has come since
//   finished  its program has come to its end, and nothing of it runs. A call that it makes after
//             all takes that back: it goes on.
//   left      it has called shutdown()
//   failed    it ends because of a failure, and has said which
//   lost      its process has ended without a word
//
// What calls do that need the peer. A call comes when its handler runs; one that XLA replays from a
// CUDA graph has no handler. None gives up what has arrived: a call that has all data ends in
// order.
//
//   absence    | in the states     | a call that waits          | that comes | that is replayed
//   -----------+-------------------+----------------------------+------------+-----------------
//   none       | unheard, running  | waits, up to its limit     | runs       | runs
//   if waited  | silent, finished  | gives up, once it has      | runs       | as one that waits
//              |                   | waited for kPatience for   |            |
//              |                   | this peer                  |            |
//   always     | left              | gives up                   | is refused | gives up
//   fault      | failed, lost      | gives up, whichever rank   | is refused | gives up
//              |                   | it waits for               |            |
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "timeouts.h"

namespace jax_intranode {

enum class PeerState : uint8_t { kUnheard, kRunning, kSilent, kFinished, kLeft, kFailed, kLost };
enum class PeerEvent : uint8_t { kHeard, kFinishes, kGoesOn, kLeaves, kFails, kEnds, kSilence };
enum class Absence : uint8_t { kNone, kIfWaited, kAlways, kFault };

constexpr PeerState StateAfter(PeerState state, PeerEvent event) {
  using enum PeerState;
  switch (state) {
    case kUnheard:
    case kRunning:
    case kSilent: {
      constexpr PeerState kNext[] = {kRunning, kFinished, kRunning, kLeft, kFailed, kLost, kSilent};
      return kNext[static_cast<int>(event)];
    }
    case kFinished:
      if (event == PeerEvent::kGoesOn) return kRunning;
      return event == PeerEvent::kFails ? kFailed : kFinished;
    default:
      return state;
  }
}

constexpr Absence AbsenceIn(PeerState state) {
  using enum PeerState;
  if (state == kSilent || state == kFinished) return Absence::kIfWaited;
  if (state == kLeft) return Absence::kAlways;
  return state == kFailed || state == kLost ? Absence::kFault : Absence::kNone;
}

// Whether a call gives up that has waited for so long for a peer, which has been absent for so
// long.
constexpr bool GivesUp(Absence absence, Clock::duration waited, Clock::duration absent) {
  if (absence != Absence::kIfWaited) return absence != Absence::kNone;
  return waited >= kPatience && absent >= kPatience;
}
constexpr bool Refuses(Absence absence) { return absence >= Absence::kAlways; }

// The devices whose processes are absent. From this set, made anew at each change, follows what the
// groups do: the return of one peer can't hide the absence of another.
struct AbsentDevice {
  PeerState state = PeerState::kRunning;
  Clock::time_point since{};
  std::string what;  // "process 1 (pid 7) has come to the end of its program"

  Absence absence() const { return AbsenceIn(state); }
};
class AbsentDevices {
 public:
  void Add(int64_t device, AbsentDevice absent) {
    AbsentDevice& known = all_[device];  // in several meshes
    if (absent.absence() > known.absence()) known = std::move(absent);
  }
  const AbsentDevice* Find(int64_t device) const {
    const auto found = all_.find(device);
    const bool is_absent = found != all_.end() && found->second.absence() != Absence::kNone;
    return is_absent ? &found->second : nullptr;
  }
  // The worst absence in a group; null if all are present.
  const AbsentDevice* WorstIn(const std::vector<int64_t>& group) const {
    const AbsentDevice* worst = nullptr;
    for (const int64_t device : group) {
      const AbsentDevice* const absent = Find(device);
      if (absent && (!worst || absent->absence() > worst->absence())) worst = absent;
    }
    return worst;
  }

 private:
  std::map<int64_t, AbsentDevice> all_;
};

}  // namespace jax_intranode
