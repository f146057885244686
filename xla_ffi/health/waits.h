// Long waits: what the monitor tells peers and users of them, and when one has lasted too long.
//
// Each process tells its peers what its ranks wait in (WaitNote), so that a report can say what the
// missing rank does instead. This file decides; it has no sockets and no clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../host/call_sites.h"
#include "failure.h"
#include "peer_message.h"
#include "platform.h"

namespace jax_intranode {

// A rank has waited for long, and goes on waiting.
inline std::string TextOf(const Wait& wait, const std::string& call, Clock::duration waited,
                          double limit_s, int missing, const std::string& detail) {
  std::string text = call;
  if (wait.calls >= 0) text += ", call " + std::to_string(wait.calls + 1) + " at this place,";
  return text + " has waited " + Seconds(std::chrono::duration<double>(waited).count()) + ": " +
         RankName(wait.device_ids, wait.rank) + " waits for " + RankName(wait.device_ids, missing) +
         detail +
         (limit_s < 1e9 ? ". It fails after " + Seconds(limit_s) + " (see JAX_INTRANODE_TIMEOUT_S)."
                        : ". It waits without a limit.");
}

class WaitReports {
 public:
  // When ranks that wait in different operations of one group give up.
  static constexpr double kMismatchEndsS = 300;

  // A note of a peer.
  void Hear(const WaitNote& note, Clock::time_point now) {
    if (note.site == 0) {
      notes_.erase({note.device, note.group});
    } else if (notes_.size() < kMostNotes || notes_.contains({note.device, note.group})) {
      notes_[{note.device, note.group}] = {note, now};
    }
  }

  struct Outcome {
    std::vector<WaitNote> notes;        // for the peers
    std::vector<std::string> warnings;  // for the log
    std::vector<std::pair<Wait, Failure>> over;
  };

  // Takes the waits of this process's ranks, all that go on. `patience`: when one is reported.
  // has_called(wait, site, count): as Platform::HasCalled. peer_of(device): what else is to be said
  // of a missing rank's process, as the end of a sentence; empty for nothing.
  template <class HasCalled, class PeerOf>
  Outcome Update(const std::vector<Wait>& waits, Clock::time_point now, Clock::duration patience,
                 const HasCalled& has_called, const PeerOf& peer_of) {
    Outcome outcome;
    std::erase_if(notes_, [&](const auto& n) { return now - n.second.heard > kStale; });
    std::map<Place, WaitNote> mine;
    for (const Wait& wait : waits) {
      const auto limit = std::chrono::duration<double>(wait.limit_s);
      if (wait.waited < std::min<Clock::duration>(kNoted, patience / 2) &&
          wait.waited < limit / 2) {
        continue;
      }
      const WaitNote note{wait.device_ids.at(wait.rank),
                          wait.device_ids.at(wait.missing),
                          wait.group,
                          wait.site_number,
                          wait.count,
                          CallOf(wait)};
      mine[{note.device, note.group}] = note;
      notes_[{note.device, note.group}] = {note, now};
    }
    const bool again = now - told_at_ >= kToldAgain;
    if (again) told_at_ = now;
    for (const auto& [place, note] : mine) {
      const auto told = told_.find(place);
      const bool same = told != told_.end() && told->second.site == note.site &&
                        told->second.count == note.count && told->second.missing == note.missing;
      if (!same || again) outcome.notes.push_back(note);
    }
    for (const auto& [place, note] : told_) {
      if (mine.contains(place)) continue;
      notes_.erase(place);
      outcome.notes.push_back({note.device, note.missing, note.group});
    }
    told_ = std::move(mine);

    std::map<Key, Report> going_on;
    for (const Wait& wait : waits) {
      if (!wait.reported) continue;
      const Key key{wait.owner.get(), wait.device_ids.at(wait.rank), wait.site_number, wait.count};
      Report report{patience};
      if (const auto known = reports_.find(key);
          known != reports_.end() && wait.waited >= known->second.waited) {
        report = known->second;
      }
      report.waited = wait.waited;
      Judge(wait, patience, has_called, peer_of, &report, &outcome);
      going_on[key] = report;
    }
    reports_ = std::move(going_on);
    return outcome;
  }

  struct Explanation {
    int missing;
    std::string detail;
    bool mismatch = false;  // the missing rank waits in another operation of the group
    bool mistake = false;   // nobody who is only late is named
  };

  // For whom a rank waits, and what that one does instead.
  template <class HasCalled, class PeerOf>
  Explanation Explain(const Wait& wait, const HasCalled& has_called, const PeerOf& peer_of) const {
    std::vector<int> others{wait.missing};
    for (size_t r = 0; r < wait.device_ids.size(); ++r) others.push_back(static_cast<int>(r));
    for (const int other : others) {
      if ((wait.present >> other & 1) != 0) continue;
      const auto found = notes_.find({wait.device_ids.at(other), wait.group});
      if (found == notes_.end()) continue;
      const WaitNote& note = found->second.note;
      if (note.site == wait.site_number && note.count == wait.count) continue;
      if (has_called(wait, note.site, note.count)) continue;
      return {other, kInstead + note.call, true, true};
    }
    const int64_t self = wait.device_ids.at(wait.rank), missing = wait.device_ids.at(wait.missing);
    std::string detail = peer_of(missing);
    if (!detail.empty()) return {wait.missing, detail, false, true};
    for (const WaitNote* note : NotesOf(missing)) {
      if (note->group == wait.group) continue;
      const std::string rest = WayTo(self, *note, kMostHops);
      const bool circle = !rest.empty();
      if (detail.empty() || circle) detail = kInstead + note->call + rest;
      if (circle) return {wait.missing, detail + ". They wait in a circle", false, true};
    }
    return {wait.missing, detail.empty() ? wait.detail : detail, false, false};
  }

  static std::string CallOf(const Wait& wait) {
    return CallSites::Get().NameOf(wait.site, wait.shared, wait.operation, wait.bytes);
  }

 private:
  static constexpr char kInstead[] = ", which waits in another operation: ";
  static constexpr auto kNoted = std::chrono::seconds(1);
  static constexpr auto kToldAgain = std::chrono::seconds(1);
  static constexpr auto kStale = std::chrono::seconds(5);
  static constexpr auto kSecondReport = std::chrono::minutes(1);
  static constexpr auto kLaterReports = std::chrono::minutes(5);
  static constexpr size_t kMostNotes = 1000;
  static constexpr int kMostHops = 8;

  struct Heard {
    WaitNote note;
    Clock::time_point heard;
  };
  using Place = std::pair<int64_t, uint64_t>;  // device and group
  struct Key {
    const void* owner;
    int64_t device;
    uint64_t site, count;
    auto operator<=>(const Key&) const = default;
  };
  struct Report {
    Clock::duration next;      // when it is reported next
    Clock::duration waited{};  // at the last look
    bool mistake = false;      // whether a report has named a mistake
  };

  template <class HasCalled, class PeerOf>
  void Judge(const Wait& wait, Clock::duration patience, const HasCalled& has_called,
             const PeerOf& peer_of, Report* report, Outcome* outcome) {
    const double waited_s = std::chrono::duration<double>(wait.waited).count();
    const bool late = waited_s >= std::min(wait.limit_s, kMismatchEndsS) && !wait.ends_itself;
    if (!late && wait.waited < std::min(report->next, patience)) return;
    const Explanation why = Explain(wait, has_called, peer_of);
    const double limit_s =
        why.mismatch && !wait.ends_itself ? std::min(wait.limit_s, kMismatchEndsS) : wait.limit_s;
    if (late && waited_s >= limit_s) {
      Failure failure =
          FailureOf(wait, why.mismatch ? FailureReason::kMismatch : FailureReason::kTimeout);
      failure.missing = why.missing;
      failure.limit_s = limit_s;
      failure.detail = why.detail;
      outcome->over.emplace_back(wait, std::move(failure));
    } else if (wait.waited >= report->next || (why.mistake && !report->mistake)) {
      const bool due = wait.waited >= report->next;
      const auto at = due ? report->next : std::max(patience, report->next - kSecondReport);
      outcome->warnings.push_back(TextOf(wait, CallOf(wait), at, limit_s, why.missing, why.detail));
      report->mistake = why.mistake;
      if (due) report->next += report->next < kSecondReport ? kSecondReport : kLaterReports;
    }
  }

  std::vector<const WaitNote*> NotesOf(int64_t device) const {
    std::vector<const WaitNote*> notes;
    for (auto it = notes_.lower_bound({device, 0}); it != notes_.end(); ++it) {
      if (it->first.first != device) break;
      notes.push_back(&it->second.note);
    }
    return notes;
  }

  // How the wait in `note` depends on the device `self`; empty if it does not.
  std::string WayTo(int64_t self, const WaitNote& note, int hops) const {
    const std::string step = ", for device " + std::to_string(note.missing);
    if (note.missing == self) return step;
    if (hops == 0) return "";
    for (const WaitNote* next : NotesOf(note.missing)) {
      const std::string rest = WayTo(self, *next, hops - 1);
      if (!rest.empty()) return step + ", which waits in " + next->call + rest;
    }
    return "";
  }

  std::map<Place, Heard> notes_;
  std::map<Place, WaitNote> told_;  // the notes of this process
  Clock::time_point told_at_{};
  std::map<Key, Report> reports_;
};

}  // namespace jax_intranode
