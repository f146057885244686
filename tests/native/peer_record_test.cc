// What a process knows of a peer (health/peer_record.h) in all short lives of a peer, of which any
// part happens before any question that the record asks. Exit status 0: it is right in all of them.
#include "xla_ffi/health/peer_record.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace jax_intranode;
using namespace std::chrono_literals;

constexpr Clock::time_point kNow(100s), kLongAgo(1s);
constexpr size_t kLongest = 4;    // a life
constexpr size_t kQuestions = 7;  // before which something may happen; the rest happens later

// What happens in a life, a letter each:
//   h f g x    it says that it lives, that it has finished, that it goes on, that it fails
//   c u        it says that it shuts down, and closes its socket; u: with unread data, so that the
//              reader sees a reset first
//   H          it says that it lives, and this process does not look for long
//   z w        it is stopped for long; it goes on, and says that it lives
//   e          /proc shows its end
//   s r        its socket ends; r: with unread data
constexpr std::string_view kAll = "hfgxcuHzwesr";

bool Has(std::string_view life, std::string_view letters) {
  return life.find_first_of(letters) != life.npos;
}

// Whether this can happen next.
bool MayFollow(std::string_view life, char next) {
  const bool stopped = life.rfind('z') != life.npos && !Has(life.substr(life.rfind('z')), "we");
  if (Has(life, "e")) return !Has(life, "csur") && (next == 's' || next == 'r');
  if (next == 'e') return true;
  if (Has(life, "csur")) return false;
  if (stopped || next == 'w') return stopped && next == 'w';
  return next != 'g' || Has(life, "f");
}

// What must be known when nothing happens any more.
PeerState LastOf(std::string_view life, bool was_stopped) {
  if (Has(life, "x")) return PeerState::kFailed;
  const size_t finished = life.rfind('f');
  if (finished != life.npos && !Has(life.substr(finished), "g")) return PeerState::kFinished;
  if (Has(life, "cu")) return PeerState::kLeft;
  if (Has(life, "esr")) return PeerState::kLost;
  const bool is_heard = Has(life, "hfgHw");
  if (!life.empty() && life.back() == 'z' && !was_stopped) return PeerState::kSilent;
  return is_heard ? PeerState::kRunning : PeerState::kUnheard;
}

// A peer, as the port of its record. Event k happens before question before[k].
struct Peer {
  const std::string& life;
  const std::vector<size_t>& before;
  size_t events = 0, questions = 0;
  std::vector<PeerNotice> packets{};
  bool stopped = false, late = false, exits = false, resets = false, socket_ends = false;
  PeerRecord record{};
  const char* error = nullptr;

  void Happens(char event) {
    const std::string_view notices = "hfgxcuHw";
    constexpr PeerNotice kNotices[] = {PeerNotice::kHeartbeat, PeerNotice::kFinished,
                                       PeerNotice::kGoesOn,    PeerNotice::kFailed,
                                       PeerNotice::kShutdown,  PeerNotice::kShutdown,
                                       PeerNotice::kHeartbeat, PeerNotice::kHeartbeat};
    if (notices.find(event) != notices.npos) packets.push_back(kNotices[notices.find(event)]);
    late |= event == 'H';
    if (event == 'z' || event == 'w') stopped = event == 'z';
    exits |= event == 'e';
    resets |= event == 'u' || event == 'r';
    socket_ends |= Has("cusr", {&event, 1});
  }
  void Ask() {
    while (events < life.size() && before[events] <= questions) Happens(life[events++]);
    ++questions;
  }
  void Look(bool was_stopped) {
    if (!packets.empty() || resets || socket_ends) record.OnSocket(*this);
    Ask();
    if (stopped || (std::exchange(late, false) && !packets.empty())) record.heard = kLongAgo;
    record.OnTick(*this, kNow, 30s, was_stopped);
  }

  PeerNews Receive(std::optional<PeerMessage>* message) {
    Ask();
    if (std::exchange(resets, false)) return PeerNews::kAgain;
    if (packets.empty()) return socket_ends ? PeerNews::kEnd : PeerNews::kNothing;
    *message = PeerMessage{packets.front(), "why"};
    packets.erase(packets.begin());
    return PeerNews::kPacket;
  }
  bool HasEnded() {
    Ask();
    return exits;
  }
  Clock::time_point Now() const { return kNow; }
  void Close() {}
  void OnNote(const PeerMessage&) {}
  void OnChange() {
    const std::string_view past = std::string_view(life).substr(0, events);
    if (record.state == PeerState::kSilent && !exits && (!stopped || !packets.empty())) {
      error = "silent, though it runs";
    }
    if (record.state == PeerState::kLost && LastOf(past, false) != PeerState::kLost) {
      error = "lost, though it runs or has said goodbye";
    }
    if (record.state == PeerState::kFailed && record.text != "why")
      error = "failed, without a text";
  }
};

void Check(const std::string& life, const std::vector<size_t>& before, bool was_stopped) {
  Peer peer{life, before};
  peer.record.heard = kNow;
  for (int look = 0; look < 2; ++look) peer.Look(was_stopped);
  peer.questions = kQuestions;
  for (int look = 0; look < 2; ++look) peer.Look(was_stopped);
  const bool is_right =
      peer.record.state == LastOf(life, was_stopped) && peer.record.over == Has(life, "cuesr");
  if (peer.error == nullptr && !is_right) peer.error = "another state at the end";
  if (peer.error == nullptr) return;
  printf("%s: \"%s\", its events before the questions", peer.error, life.c_str());
  for (const size_t question : before) printf(" %zu", question);
  printf("; state %d\n", static_cast<int>(peer.record.state));
  std::exit(1);
}

// All lives that begin like this, whose events happen as late as this or later.
void CheckAll(const std::string& life, const std::vector<size_t>& before) {
  for (const bool was_stopped : {false, true}) Check(life, before, was_stopped);
  if (life.size() == kLongest) return;
  for (const char next : kAll) {
    if (!MayFollow(life, next)) continue;
    for (size_t at = before.empty() ? 0 : before.back(); at <= kQuestions; ++at) {
      std::vector<size_t> longer = before;
      longer.push_back(at);
      CheckAll(life + next, longer);
    }
  }
}

}  // namespace

int main() {
  CheckAll("", {});
  printf("done\n");
}
