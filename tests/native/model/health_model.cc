// Checks what the monitor decides about peers (health/peer_table.h, health/peer_record.h) in all
// orders of events.
//
//   health_model [variant] [processes] [stops] [quick]
//
// Process 0 watches the others. What a process sends does not depend on what it hears, so that one
// watcher stands for all. Its peer does anything at any time: it finishes, takes that back by a
// call, fails, shuts down, stops and goes on (so many times), or is killed. Two peers do less. The
// monitor looks at any time, and peers also act between any two questions that it asks. Meanwhile
// the program arms the watch and closes it. A call of process 0 waits for all peers. The end of a
// process shows in steps: /proc says that it is exiting, its socket ends. The search is repeated
// where a forked child holds the socket, and where /proc does not show the peer; "quick" leaves out
// the latter.
//
// Real is what decides. The model repeats processes, sockets and locks. Its sockets hold
// everything. Time passes in two ways: a peer that does not run, or whose heartbeat has not been
// read, may have been silent for too long; and a call may have waited for kPatience, but not while
// a peer's word that it goes on is on its way.
//
// Checked is what the platform is told, as it happens (World::Change, World::Tell), whether the
// call is given up though all peers come, and what is known in the end, from each state
// (World::Settle). Variants other than "sound" do on purpose what the code must not do. Exit
// status: that of collectives_model.cc.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "xla_ffi/health/peer_record.h"

namespace jin = jax_intranode;
using jin::PeerNews;
using jin::PeerNotice;
using jin::PeerState;

namespace {

constexpr int kMostPeers = 2;
constexpr size_t kMostPackets = 8;
const jin::Clock::time_point kNow{std::chrono::seconds(100)}, kLongAgo{};
constexpr auto kSilent = std::chrono::seconds(30);

const std::vector<std::pair<const char*, const char*>> kVariants = {
    {"end_first", "an end is judged before the socket has been read"},
    {"proc_last", "/proc is asked when the socket has been read"},
    {"silence_first", "a silence is judged before the socket has been read"},
    {"reset_is_end", "what a peer sent before it closed its socket is not read"},
    {"forgets_before_arm", "what came before the watch was armed is dropped"},
    {"no_goodbye", "nobody remembers that a peer has finished"},
    {"stays_silent", "a peer that is heard again is not present again"},
    {"stays_finished", "a call after the end takes nothing back"},
    {"last_fault", "the last fault of a peer counts, not the first one"},
    {"socket_only", "only the socket tells of an end"},
    {"one_bit", "the return of one peer clears the absence of all"},
    {"no_patience", "a call gives up at once for a peer that may come back"},
    {"close_any_time", "Close() does not wait until the platform has been told"},
};
std::string variant = "sound";
bool Is(const char* name) { return variant == name; }

// Where a peer runs.
struct Place {
  bool child_holds_socket, shows_in_proc;
};
Place place;

// A peer, and what process 0 has of it.
struct Peer {
  // What it has said, and how it is.
  bool finished = false, shut_down = false, failed = false;
  uint8_t call = 0;  // after its end: 0: none, 1: made, 2: and told
  bool stopped = false, exits = false, socket_closed = false;
  uint8_t stops = 0;
  // On the way to process 0.
  std::vector<PeerNotice> packets{};
  bool reset = false;
  // In process 0.
  jin::PeerRecord record{};
  bool socket_open = true;

  // It has made a call since it said that it had finished, and will say so.
  bool HasToSay() const { return call == 1; }
  bool Comes() const { return Runs() && !shut_down && !failed && (!finished || call == 1); }
  bool Runs() const { return !stopped && !exits; }
  bool HasHeartbeat() const {
    return std::find(packets.begin(), packets.end(), PeerNotice::kHeartbeat) != packets.end();
  }
  bool SocketEnds() const { return socket_closed && !place.child_holds_socket; }
  bool SocketIsReady() const { return socket_open && (!packets.empty() || reset || SocketEnds()); }
};

// What the thread does. A step of it ends after one question to a Port. The next step begins anew,
// from the record as it was, and gets the same answers before it asks the next question.
enum class Doing : char { kNothing, kSocket, kTick, kTickAfterOwnStop };
struct NextQuestion {
  char question;
};

struct World {
  std::vector<Peer> peers{};
  Doing doing = Doing::kNothing;
  int with = 0;           // with this peer
  std::string answers{};  // so far
  std::string at{};       // what they have led to: the same leads to the same
  bool armed = false, closes = false, closed = false;
  bool changed = false;           // the platform has to be told
  PeerState known[kMostPeers]{};  // by the platform
  bool waited[kMostPeers]{};      // its call, for kPatience
  bool gave_up = false;
  std::string error{};

  void Fail(const std::string& what) {
    if (error.empty()) error = what;
  }
  std::string Key() const;

  // The peers.
  using Action = std::pair<const char*, std::function<void(Peer&)>>;
  std::vector<Action> ActionsOf(int p, int stops) const;
  static std::vector<Action> ActionsOfFew(const Peer& peer);

  // The monitor.
  void Go(bool at_once);
  void Do(struct Port& port);
  void DoAtOnce(Doing what, int p) {
    doing = what;
    with = p;
    Go(true);
    if (changed) Tell();
  }
  void Change(int p);
  void Tell();
  void JudgeCall();

  void Arm();
  void Settle();

  // The monitor has a lock from its look until the platform has been told.
  bool MonitorLooks() const { return doing != Doing::kNothing; }
  bool MonitorIsFree() const { return !MonitorLooks() && !changed; }
};

std::string KeyOfRecord(const Peer& peer) {
  const jin::PeerRecord& r = peer.record;
  return {static_cast<char>(r.state), static_cast<char>(r.over << 1 | (r.heard == kNow) << 2),
          static_cast<char>(peer.socket_open | !r.text.empty() << 2)};
}

std::string World::Key() const {
  std::string key;
  const auto add = [&key](auto... values) { (key.push_back(static_cast<char>(values)), ...); };
  for (size_t p = 0; p < peers.size(); ++p) {
    const Peer& peer = peers[p];
    add(peer.finished << 1 | peer.shut_down << 2 | peer.failed << 3 | peer.call << 4,
        peer.stopped | peer.exits << 1 | peer.socket_closed << 2 | peer.reset << 3, peer.stops,
        peer.packets.size());
    for (const PeerNotice notice : peer.packets) add(notice);
    key += KeyOfRecord(peer);
    add(known[p], waited[p]);
  }
  add(doing, with, at.size());
  key += at;
  add(armed | changed << 1 | closes << 2 | closed << 3 | gave_up << 4);
  return key;
}

// What a peer may do.
void Says(Peer& p, PeerNotice notice) {
  if (!p.socket_closed) p.packets.push_back(notice);
}
void Finishes(Peer& p) {
  Says(p, PeerNotice::kFinished);
  p.finished = true;
}
void Calls(Peer& p) { p.call = 1; }
// Takes back that it has finished. It may finish once more.
void SaysSo(Peer& p) {
  Says(p, PeerNotice::kGoesOn);
  p.finished = false;
  p.call = 2;
}
void Fails(Peer& p) {
  Says(p, PeerNotice::kFailed);
  p.failed = true;
}
void Stops(Peer& p) {
  p.stopped = true;
  ++p.stops;
}
void GoesOn(Peer& p) { p.stopped = false; }
void Ends(Peer& p) { p.exits = p.socket_closed = true; }

// One of several peers does less: it says one thing at most, and ends at once.
std::vector<World::Action> World::ActionsOfFew(const Peer& peer) {
  std::vector<Action> actions;
  if (!peer.Runs()) return actions;
  if (!peer.finished && !peer.failed) {
    actions.push_back({"finishes", &Finishes});
    actions.push_back({"fails", &Fails});
  }
  if (peer.finished && peer.call == 0) actions.push_back({"calls", &Calls});
  if (peer.HasToSay()) actions.push_back({"says so", &SaysSo});
  actions.push_back({"ends", &Ends});
  return actions;
}

std::vector<World::Action> World::ActionsOf(int p, int stops) const {
  const Peer& peer = peers[p];
  const bool may_stop = peer.Runs() && peer.stops < stops;
  std::vector<Action> actions;
  if (peers.size() > 1) {
    actions = ActionsOfFew(peer);
    if (p == 0 && may_stop) actions.push_back({"stops", &Stops});
    if (peer.stopped) actions.push_back({"goes on", &GoesOn});
    return actions;
  }
  if (peer.Runs() && !peer.socket_closed) {
    // A second heartbeat that is not read, or is read in the same look, says no more than the
    // first.
    const bool was_read =
        with == p && answers.find(static_cast<char>(PeerNotice::kHeartbeat)) != answers.npos;
    if (!peer.HasHeartbeat() && !was_read) {
      actions.push_back({"beats", [](Peer& p) { Says(p, PeerNotice::kHeartbeat); }});
    }
    if (!peer.finished) actions.push_back({"finishes", &Finishes});
    if (peer.finished && peer.call == 0) actions.push_back({"calls", &Calls});
    if (peer.HasToSay()) actions.push_back({"says so", &SaysSo});
    if (!peer.failed) actions.push_back({"fails", &Fails});
    // With and without having read all that process 0 has sent.
    for (const bool reset : {false, true}) {
      actions.push_back({reset ? "closes, with unread data" : "closes", [reset](Peer& p) {
                           Says(p, PeerNotice::kShutdown);
                           p.shut_down = p.socket_closed = true;
                           p.reset = reset;
                         }});
    }
  }
  if (may_stop) actions.push_back({"stops", &Stops});
  if (peer.stopped) actions.push_back({"goes on", &GoesOn});
  if (!peer.exits) {
    actions.push_back({"begins to end", [](Peer& p) {
                         p.exits = true;
                         p.stopped = false;
                       }});
  } else if (!peer.socket_closed) {
    for (const bool reset : {false, true}) {
      actions.push_back(
          {reset ? "loses its socket, with unread data" : "loses its socket", [reset](Peer& p) {
             p.socket_closed = true;
             p.reset = reset;
           }});
    }
  }
  return actions;
}

// What the record of a peer asks and tells.
struct Port {
  World& world;
  const int p;
  const std::string answers;
  const bool at_once;  // all questions in one step
  std::string given{};
  size_t asked = 0;
  bool hides_packets = false;

  Peer& peer() { return world.peers[p]; }
  template <class Ask>
  char Answer(char question, Ask ask) {
    if (asked < answers.size()) {
      given.push_back(answers[asked]);
    } else {
      if (asked > answers.size() && !at_once) throw NextQuestion{question};
      given.push_back(ask());
    }
    return given[asked++];
  }

  PeerNews Receive(std::optional<jin::PeerMessage>* message) {
    if (!peer().socket_open) return PeerNews::kEnd;
    if (hides_packets) return PeerNews::kNothing;
    // A notice is a letter.
    const char answer = Answer('r', [this] {
      if (peer().reset) {
        peer().reset = false;
        return static_cast<char>(Is("reset_is_end") ? PeerNews::kEnd : PeerNews::kAgain);
      }
      if (!peer().packets.empty()) {
        const PeerNotice notice = peer().packets.front();
        peer().packets.erase(peer().packets.begin());
        return static_cast<char>(notice);
      }
      return static_cast<char>(peer().SocketEnds() ? PeerNews::kEnd : PeerNews::kNothing);
    });
    if (answer < 'a') return static_cast<PeerNews>(answer);
    const auto notice = static_cast<PeerNotice>(answer);
    *message = jin::ParseMessage(jin::Packet(notice, answer == 'f' ? "why" : ""));
    return PeerNews::kPacket;
  }
  bool HasEnded() {
    const bool exits = Answer('x', [this]() -> char {
      return place.shows_in_proc && peer().exits && !Is("socket_only");
    });
    if (Is("proc_last") || Is("end_first")) hides_packets = exits;
    return exits;
  }
  jin::Clock::time_point Now() { return kNow; }
  void Close() { peer().socket_open = false; }
  void OnNote(const jin::PeerMessage&) {}
  void OnChange() { world.Change(p); }
};

// The thread goes on with what it does, as far as its next question.
void World::Go(bool at_once) {
  const Peer before = peers[with];
  Port port{*this, with, answers, at_once};
  try {
    Do(port);
    doing = Doing::kNothing;
    with = 0;
    answers.clear();
    at.clear();
  } catch (const NextQuestion& next) {
    const bool was_heard = port.given.find(static_cast<char>(PeerNotice::kHeartbeat)) != at.npos;
    const bool is_tick = doing == Doing::kTick || doing == Doing::kTickAfterOwnStop;
    at = KeyOfRecord(peers[with]) + next.question;
    at.push_back(was_heard | port.hides_packets << 1 | (is_tick && port.given[0] == 1) << 2);
    at.push_back(static_cast<char>(changed));
    peers[with].record = before.record;
    peers[with].socket_open = before.socket_open;
    changed = false;
    answers = port.given;
  }
}

void World::Do(Port& port) {
  jin::PeerRecord& record = peers[with].record;
  const PeerState before = record.state;
  const bool was_fault = jin::AbsenceIn(before) == jin::Absence::kFault;
  if (Is("last_fault") && was_fault && !record.over) record.state = PeerState::kRunning;
  switch (doing) {
    case Doing::kNothing:
      break;
    case Doing::kSocket:
      record.OnSocket(port);
      break;
    case Doing::kTick:
    case Doing::kTickAfterOwnStop:
      if (Is("proc_last")) record.OnSocket(port);
      port.hides_packets = Is("silence_first");
      record.OnTick(port, kNow, kSilent, doing == Doing::kTickAfterOwnStop);
      break;
  }
  const bool comes_back = record.state == PeerState::kRunning;
  if (comes_back && ((Is("stays_silent") && before == PeerState::kSilent) ||
                     (Is("stays_finished") && before == PeerState::kFinished))) {
    record.state = before;
  }
  if (Is("no_goodbye") && record.state == PeerState::kFinished) record.state = PeerState::kRunning;
}

// The record has a new state.
void World::Change(int p) {
  changed = true;
  const Peer& peer = peers[p];
  const auto& record = peer.record;
  switch (record.state) {
    case PeerState::kUnheard:
      Fail("wrong: a peer that was heard is unheard of");
      break;
    case PeerState::kRunning:
      break;
    case PeerState::kSilent:
      if (peer.stops == 0 && !peer.exits) Fail("wrong: a peer that ran is silent");
      break;
    case PeerState::kFinished:
      if (!peer.finished && peer.call == 0) Fail("wrong: a peer has finished that has not said so");
      break;
    case PeerState::kLeft:
      if (!peer.shut_down) Fail("wrong: a peer has left that has not said so");
      break;
    case PeerState::kFailed:
      if (!peer.failed || record.text != "why") Fail("wrong: a failure without a text");
      break;
    case PeerState::kLost:
      if (peer.finished || peer.shut_down) {
        Fail("wrong: a peer that said goodbye is lost");
      } else if (peer.failed) {
        Fail("wrong: a peer is lost, and not for the reason that it gave");
      } else if (!peer.exits) {
        Fail("wrong: a peer that runs is lost");
      }
      break;
  }
}

// The platform is told of all peers.
void World::Tell() {
  changed = false;
  if (closed) Fail("wrong: the platform is told after Close()");
  bool returns = false;
  for (size_t p = 0; p < peers.size(); ++p) {
    const PeerState now = peers[p].record.state;
    if (now == known[p]) continue;
    if (jin::AbsenceIn(known[p]) == jin::Absence::kFault || known[p] == PeerState::kLeft) {
      Fail("wrong: a change that can't follow the last one");
    }
    returns |= now == PeerState::kRunning && known[p] != PeerState::kUnheard;
    known[p] = now;
    waited[p] = false;
  }
  for (size_t p = 0; p < peers.size() && returns && Is("one_bit"); ++p) {
    known[p] = PeerState::kRunning;
  }
  JudgeCall();
}

// The call that waits for all peers.
void World::JudgeCall() {
  if (gave_up) return;
  bool all_come = true;
  for (size_t p = 0; p < peers.size(); ++p) {
    const bool long_ago = waited[p] || Is("no_patience");
    const auto time = long_ago ? jin::kPatience : std::chrono::seconds(0);
    gave_up |= jin::GivesUp(jin::AbsenceIn(known[p]), time, time);
    // One that was stopped may come back too late.
    all_come &= peers[p].Comes() && peers[p].stops == 0;
  }
  if (gave_up && all_come) Fail("wrong: a call gives up though all peers come");
}

void World::Arm() {
  armed = true;
  for (Peer& peer : peers) {
    peer.record.heard = kNow;
    if (Is("forgets_before_arm")) peer.packets.clear();
  }
}

// What will be known if nobody does anything more, but those that run send heartbeats, and say that
// they go on.
void World::Settle() {
  if (!armed) Arm();
  for (int round = 0; round < 4; ++round) {
    for (size_t p = 0; p < peers.size(); ++p) {
      Peer& peer = peers[p];
      const int number = static_cast<int>(p);
      if (peer.exits) peer.socket_closed = true;
      if (peer.Runs() && !peer.socket_closed) peer.packets.push_back(PeerNotice::kHeartbeat);
      if (peer.Runs() && !peer.socket_closed && peer.HasToSay()) SaysSo(peer);
      peer.record.heard = kLongAgo;
      if (peer.SocketIsReady()) DoAtOnce(Doing::kSocket, number);
      DoAtOnce(Doing::kTick, number);
    }
  }
  if (changed) Tell();
  for (size_t p = 0; p < peers.size(); ++p) {
    const Peer& peer = peers[p];
    const bool shows = place.shows_in_proc || !place.child_holds_socket;
    const PeerState now = known[p];
    if (now != peer.record.state) {
      Fail("wrong: the platform knows another state than the monitor");
    } else if (peer.failed) {
      if (now != PeerState::kFailed) Fail("wrong: nobody knows of a failure");
    } else if (peer.finished) {
      if (now != PeerState::kFinished)
        Fail("a wait without end: nobody knows that a peer finished");
    } else if (peer.shut_down) {
      if (now != PeerState::kLeft) Fail("a wait without end: nobody has heard a goodbye");
    } else if (peer.exits && shows) {
      if (now != PeerState::kLost)
        Fail("a wait without end: nobody knows that a process has ended");
    } else if (peer.exits) {
      if (now == PeerState::kRunning) Fail("a wait without end: an end, and not even a silence");
    } else if (peer.stopped) {
      if (now != PeerState::kSilent) Fail("a wait without end: nobody knows of a stop");
    } else if (jin::AbsenceIn(now) != jin::Absence::kNone) {
      Fail("wrong: a peer that runs is absent");
    }
  }
}

// States are told apart by 128 bits of a hash.
struct Hash {
  uint64_t a = 11, b = 13;
  Hash() = default;
  explicit Hash(const std::string& key) {
    for (const char c : key) {
      a = (a ^ static_cast<unsigned char>(c)) * 0x9E3779B97F4A7C15u;
      a ^= a >> 29;
      b = (b + static_cast<unsigned char>(c)) * 0xD6E8FEB86659FD93u;
      b ^= b >> 32;
    }
  }
  bool operator==(const Hash&) const = default;
  size_t operator()(const Hash& hash) const { return hash.a; }
};

// Breadth first, so that the first error has a shortest way to it.
class Search {
 public:
  Search(int peers, int stops) : stops_(stops) {
    World world;
    world.peers.resize(peers);
    for (Peer& peer : world.peers) peer.record.heard = kNow;
    Visit(std::move(world), -1, "");
  }

  // Returns the error with the way to it; empty if there is none.
  std::string Run() {
    for (; error_.empty() && !queue_.empty(); ++next_) {
      const World world = std::move(queue_.front());
      queue_.pop_front();
      from_ = next_;
      Expand(world);
    }
    return error_;
  }
  size_t states() const { return way_.size(); }
  size_t steps() const { return steps_; }

 private:
  struct Step {
    long before;
    const std::string* what;
  };

  void Visit(World&& world, long before, const std::string& what) {
    ++steps_;
    if (!error_.empty()) return;
    std::string error = world.error;
    if (error.empty() && !seen_.insert(Hash(world.Key())).second) return;
    for (const Peer& peer : world.peers) {
      if (peer.packets.size() > kMostPackets) error = "too many packets for the model";
    }
    way_.push_back({before, &*names_.insert(what).first});
    if (error.empty() && !world.closes && world.MonitorIsFree()) {
      World settled = world;
      settled.Settle();
      error = settled.error;
    }
    if (!error.empty()) {
      error_ = error + "\n";
      std::vector<std::string> lines;
      for (long at = static_cast<long>(way_.size()) - 1; at > 0; at = way_[at].before) {
        lines.push_back("  " + *way_[at].what + "\n");
      }
      for (auto line = lines.rbegin(); line != lines.rend(); ++line) error_ += *line;
      return;
    }
    queue_.push_back(std::move(world));
  }

  template <class Take>
  void One(const World& world, const std::string& what, Take take) {
    World after = world;
    take(after);
    Visit(std::move(after), from_, what);
  }

  void Expand(const World& world) {
    const int peers = static_cast<int>(world.peers.size());
    const bool is_free = world.MonitorIsFree();
    if (!world.MonitorLooks() && world.changed) {
      One(world, "the monitor tells the platform", [](World& w) { w.Tell(); });
    }
    if (world.closed) return;
    if (world.closes) {
      if (is_free || Is("close_any_time")) {
        One(world, "Close() returns", [](World& w) { w.closed = true; });
      }
      return;
    }
    for (int p = 0; p < peers; ++p) {
      const Peer& peer = world.peers[p];
      const std::string name = "process " + std::to_string(p + 1);
      for (const auto& action : world.ActionsOf(p, stops_)) {
        One(world, name + " " + action.first, [&](World& w) { action.second(w.peers[p]); });
      }
      // A word that takes back that the peer has finished arrives in time.
      const auto& packets = peer.packets;
      const bool has_news =
          std::find(packets.begin(), packets.end(), PeerNotice::kGoesOn) != packets.end();
      if (jin::AbsenceIn(world.known[p]) == jin::Absence::kIfWaited && !world.waited[p] &&
          !(peer.Runs() && peer.HasToSay()) && !has_news && is_free) {
        One(world, "a call has waited for " + name, [p](World& w) {
          w.waited[p] = true;
          w.JudgeCall();
        });
      }
      const bool is_looked_at = world.MonitorLooks() && world.with == p;
      if (world.armed && peer.record.heard == kNow && !is_looked_at &&
          (!peer.Runs() || peer.socket_closed || peer.HasHeartbeat())) {
        One(world, name + " has not been heard for long",
            [p](World& w) { w.peers[p].record.heard = kLongAgo; });
      }
    }
    if (!world.armed) {
      One(world, "the program arms the watch", [](World& w) { w.Arm(); });
      return;
    }
    if (world.MonitorLooks()) {
      One(world, "the monitor looks on", [](World& w) { w.Go(false); });
    } else {
      One(world, "the program begins to close", [](World& w) { w.closes = true; });
    }
    if (!is_free) return;
    for (int p = 0; p < peers; ++p) {
      const Peer& peer = world.peers[p];
      const auto begins = [&](Doing doing, const char* what) {
        One(world, std::string("the monitor ") + what + " process " + std::to_string(p + 1),
            [=](World& w) {
              w.doing = doing;
              w.with = p;
              w.Go(false);
            });
      };
      if (peer.SocketIsReady()) begins(Doing::kSocket, "looks at the socket of");
      if (peer.record.over) continue;
      begins(Doing::kTick, "ticks for");
      if (peer.record.heard == kLongAgo) {
        begins(Doing::kTickAfterOwnStop, "ticks after a gap for");
      }
    }
  }

  const int stops_;
  std::deque<World> queue_;
  std::unordered_set<Hash, Hash> seen_;
  std::set<std::string> names_;
  std::vector<Step> way_;
  long next_ = 0, from_ = 0;
  size_t steps_ = 0;
  std::string error_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) variant = argv[1];
  const int processes = argc > 2 ? atoi(argv[2]) : 2;
  const int stops = argc > 3 ? atoi(argv[3]) : 1;
  const bool quick = argc > 4 && strcmp(argv[4], "quick") == 0;
  bool known = variant == "sound";
  for (const auto& broken : kVariants) known |= variant == broken.first;
  if (!known) {
    printf("unknown variant. All are:\n");
    for (const auto& [name, what] : kVariants) printf("  %s: %s\n", name, what);
    return 2;
  }
  if (processes < 2 || processes > kMostPeers + 1 || stops < 0 || stops > 3) return 2;
  const auto began = std::chrono::steady_clock::now();
  size_t states = 0, steps = 0;
  for (int kind = 0; kind < 4; ++kind) {
    place = {(kind & 1) != 0, (kind & 2) == 0};
    // The usual one, and one where only /proc tells of an end.
    if (quick && kind > 1) continue;
    Search search(processes - 1, stops);
    const std::string error = search.Run();
    states += search.states();
    steps += search.steps();
    if (!error.empty()) {
      printf("%s", error.c_str());
      printf("  (a child holds the socket: %d, /proc: %d)\n", place.child_holds_socket,
             place.shows_in_proc);
      printf("%s: ranks %d operations %d ends wrong, after %zu states\n", variant.c_str(),
             processes, stops, states);
      return 1;
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  printf("%s: ranks %d operations %d wrong 0 states %zu steps %zu, %.1f s\n", variant.c_str(),
         processes, stops, states, steps, seconds);
  return 0;
}
