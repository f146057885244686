// Long waits: what the monitor tells peers and users of them, and when one has lasted too long.
//
// Each process tells its peers what its ranks wait in (WaitNote), so that a report can say what the
// missing rank does instead. This file decides; it has no sockets and no clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"
#include "peer_message.h"
#include "platform.h"

namespace jax_intranode {

// A rank has waited for long, and goes on waiting.
inline std::string TextOf(const Wait& wait, Clock::duration waited) {
  std::string text = wait.Name();
  if (wait.calls >= 0) text += ", call " + std::to_string(wait.calls + 1) + " at this place,";
  return text + " has waited " + Seconds(std::chrono::duration<double>(waited).count()) + ": " +
         RankName(wait.device_ids, wait.rank) + " waits for " +
         RankName(wait.device_ids, wait.missing) + wait.detail +
         (wait.limit_s < 1e9
              ? ". It fails after " + Seconds(wait.limit_s) + " (see JAX_INTRANODE_TIMEOUT_S)."
              : ". It waits without a limit.");
}

class WaitReports {
 public:
  // peer_of(device): what else is to be said of the process of a missing rank, as the end of a
  // sentence; empty for nothing.
  explicit WaitReports(std::function<std::string(int64_t device)> peer_of)
      : peer_of_(std::move(peer_of)) {}

  // A note of a peer.
  void Hear(const WaitNote& note, Clock::time_point now) {
    const Place place{note.device, note.group};
    if (notes_.size() < kMostNotes || notes_.contains(place)) notes_[place] = {note, now};
  }

  struct Outcome {
    std::vector<WaitNote> notes;        // for the peers
    std::vector<std::string> warnings;  // for the log
    std::vector<std::pair<Wait, FailureReason>> over;
  };

  // Takes the waits of this process's ranks, all that go on. `patience`: when one is reported.
  Outcome Update(const std::vector<Wait>& waits, Clock::time_point now, Clock::duration patience) {
    Outcome outcome;
    for (const Place& place : mine_) notes_.erase(place);
    mine_.clear();
    std::erase_if(notes_, [&](const auto& n) { return now - n.second.heard > kStale; });
    for (const Wait& wait : waits) {
      const auto half = std::chrono::duration<double>(wait.limit_s / 2);
      if (wait.waited < std::min<Clock::duration>(kNoted, patience / 2) && wait.waited < half) {
        continue;
      }
      const WaitNote note{wait.device_ids.at(wait.rank),
                          DeviceOf(wait, wait.missing),
                          wait.group,
                          wait.site_number,
                          wait.count,
                          wait.Name()};
      mine_.emplace_back(note.device, note.group);
      notes_[mine_.back()] = {note, now};
      if (now - told_at_ >= kToldAgain) outcome.notes.push_back(note);
    }
    if (!outcome.notes.empty()) told_at_ = now;

    std::map<Key, Report> going_on;
    for (const Wait& wait : waits) {
      if (!wait.reported) continue;
      const Key key{wait.device_ids.at(wait.rank), wait.group, wait.site_number, wait.count};
      const auto known = reports_.find(key);
      const bool is_new = known == reports_.end() || wait.waited < known->second.waited;
      Report& report = going_on[key] = is_new ? Report{patience} : known->second;
      report.waited = wait.waited;
      Judge(wait, patience, &report, &outcome);
    }
    reports_ = std::move(going_on);
    return outcome;
  }

  enum class Mistake : uint8_t {
    kNone,
    kMismatch,  // the missing rank waits in another operation of the group
    kOther,     // another mistake of the program: nobody is only late
  };

  // Adds for whom a rank waits, and what that one does instead.
  Mistake Explain(Wait* wait) const {
    std::vector<int> others{wait->missing};
    for (size_t r = 0; r < wait->device_ids.size(); ++r) others.push_back(static_cast<int>(r));
    for (const int other : others) {
      if (other < 0 || (wait->present >> other & 1) != 0) continue;
      const auto found = notes_.find({wait->device_ids.at(other), wait->group});
      if (found == notes_.end()) continue;
      const WaitNote& note = found->second.note;
      if (note.site == wait->site_number && note.count == wait->count) continue;
      if (wait->has_called && wait->has_called(note.site, note.count)) continue;
      wait->missing = other;
      wait->detail = kInstead + note.call;
      return Mistake::kMismatch;
    }
    const int64_t self = wait->device_ids.at(wait->rank);
    const int64_t missing = DeviceOf(*wait, wait->missing);
    if (const std::string peer = peer_of_(missing); !peer.empty()) {
      wait->detail = peer;
      return Mistake::kOther;
    }
    const std::string plain = wait->detail;
    for (const WaitNote* note : NotesOf(missing)) {
      if (note->group == wait->group) continue;
      const std::string rest = WayTo(self, *note, kMostHops);
      if (!rest.empty()) {
        wait->detail = kInstead + note->call + rest + ". They wait in a circle";
        return Mistake::kOther;
      }
      if (wait->detail == plain) wait->detail = kInstead + note->call + ForWhom(*note);
    }
    return Mistake::kNone;
  }

 private:
  static constexpr char kInstead[] = ", which waits in another operation: ";
  static constexpr size_t kMostNotes = 1000;
  static constexpr int kMostHops = 8;

  struct Heard {
    WaitNote note;
    Clock::time_point heard;
  };
  using Place = std::pair<int64_t, uint64_t>;  // device and group
  struct Key {
    int64_t device;
    uint64_t group, site, count;
    auto operator<=>(const Key&) const = default;
  };
  struct Report {
    Clock::duration next;      // when it is reported next
    Clock::duration waited{};  // at the last look
    bool mistake = false;      // whether a report has named a mistake
  };

  void Judge(Wait wait, Clock::duration patience, Report* report, Outcome* outcome) {
    const double waited_s = std::chrono::duration<double>(wait.waited).count();
    const double soonest_s = std::min<double>(wait.limit_s, kMismatchEnds.count());
    const bool late = wait.give_up && waited_s >= soonest_s;
    if (!late && wait.waited < std::min(report->next, patience)) return;
    const Mistake mistake = Explain(&wait);
    const bool mismatch = mistake == Mistake::kMismatch;
    if (mismatch && wait.give_up) wait.limit_s = soonest_s;
    const bool due = wait.waited >= report->next;
    if (late && waited_s >= wait.limit_s) {
      outcome->over.emplace_back(std::move(wait),
                                 mismatch ? FailureReason::kMismatch : FailureReason::kTimeout);
    } else if (due || (mistake != Mistake::kNone && !report->mistake)) {
      const auto at = due ? report->next : std::max(patience, report->next - kSecondReport);
      outcome->warnings.push_back(TextOf(wait, at));
      report->mistake = mistake != Mistake::kNone;
      if (due) report->next += report->next < kSecondReport ? kSecondReport : kLaterReports;
    }
  }

  std::vector<const WaitNote*> NotesOf(int64_t device) const {
    std::vector<const WaitNote*> notes;
    for (const auto& [place, heard] : notes_) {
      if (place.first == device) notes.push_back(&heard.note);
    }
    return notes;
  }

  // -1 for a rank that does not exist.
  static int64_t DeviceOf(const Wait& wait, int rank) {
    return rank < 0 ? -1 : wait.device_ids.at(rank);
  }
  static std::string ForWhom(const WaitNote& note) {
    return note.missing < 0 ? "" : ", for device " + std::to_string(note.missing);
  }

  // How the wait in `note` depends on the device `self`; empty if it does not.
  std::string WayTo(int64_t self, const WaitNote& note, int hops) const {
    const std::string step = ForWhom(note);
    if (note.missing == self) return step;
    if (hops == 0) return "";
    for (const WaitNote* next : NotesOf(note.missing)) {
      const std::string rest = WayTo(self, *next, hops - 1);
      if (!rest.empty()) return step + ", which waits in " + next->call + rest;
    }
    return "";
  }

  const std::function<std::string(int64_t)> peer_of_;
  std::map<Place, Heard> notes_;
  std::vector<Place> mine_;  // the notes of this process
  Clock::time_point told_at_{};
  std::map<Key, Report> reports_;
};

}  // namespace jax_intranode
