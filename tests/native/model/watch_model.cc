// Checks the decisions of the watch of the peers (host/peer_record.h) in all orders of events.
//
//   watch_model [variant] [processes] [stops] [quick]
//
// Process 0 watches the others. What a process sends does not depend on what it hears, so that one
// watcher stands for all. Its first peer does anything at any time: it finishes, fails,
// shuts down, stops and goes on (so many times), or is killed. A second peer does less. The watch's
// thread looks at any time, and peers also act between any two questions that it asks. Meanwhile
// the program arms the watch, makes a new communicator, announces, and closes. The end of a process
// shows in steps: /proc says that it is exiting, its socket ends, its pidfd becomes readable, /proc
// forgets it. The search is repeated where a child holds the socket, where there is no pidfd, and
// where /proc does not show the peer; "quick" leaves out most of these places.
//
// Real is what decides about a peer. The model repeats processes, sockets and locks. Its sockets
// hold everything. Time passes in one way: a peer that does not run, or whose heartbeat has not
// been read, may have been silent for too long.
//
// Checked is what communicators are told, as it happens (World::Change, World::Deliver), and what
// they know in the end, from each state (World::Settle). Variants other than "sound" do on purpose
// what the code must not do. Exit status: that of collectives_model.cc.
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

#include "xla_ffi/host/peer_record.h"

namespace jin = jax_intranode;
using jin::PeerNews;
using jin::PeerNotice;
using jin::PeerReason;
using jin::PeerState;

namespace {

constexpr int kMostPeers = 2;
constexpr size_t kMostPackets = 8;
const jin::PeerRecord::Time kNow{std::chrono::seconds(100)}, kLongAgo{};
constexpr auto kSilent = std::chrono::seconds(30);

const std::vector<std::pair<const char*, const char*>> kVariants = {
    {"pidfd_first", "an end is judged before the socket has been read"},
    {"proc_last", "/proc is asked when the socket has been read"},
    {"silence_first", "a silence is judged before the socket has been read"},
    {"reset_is_end", "what a peer sent before it closed its socket is not read"},
    {"forgets_before_arm", "what came before the watch was armed is dropped"},
    {"no_goodbye", "nobody remembers that a peer leaves"},
    {"stays_stopped", "a peer that is heard again is not present again"},
    {"stops_dead", "a peer that is dead may stop"},
    {"last_fault", "the last fault of a peer counts, not the first one"},
    {"tells_twice", "a peer that is gone may go again"},
    {"socket_only", "only the socket tells of an end"},
    {"announce_any_time", "new communicators are told while others are"},
    {"close_any_time", "Close() does not wait for callbacks"},
};
std::string variant = "sound";
bool Is(const char* name) { return variant == name; }

// Where a peer runs.
struct Place {
  bool child_holds_socket, has_pidfd, shows_in_proc;
};
Place place;

struct Told {
  PeerState state = PeerState::kPresent;
  PeerReason reason = PeerReason::kNone;
  bool operator==(const Told&) const = default;
};

// A peer, and what process 0 has of it.
struct Peer {
  // What it has said, and how it is.
  bool finished = false, shut_down = false, failed = false;
  bool stopped = false, exits = false, socket_closed = false, ended = false, reaped = false;
  uint8_t stops = 0;
  // On the way to process 0.
  std::vector<PeerNotice> packets{};
  bool reset = false;
  // In process 0.
  jin::PeerRecord record{};
  bool socket_open = true, pidfd_open = true;

  bool Runs() const { return !stopped && !exits; }
  bool HasHeartbeat() const {
    return std::find(packets.begin(), packets.end(), PeerNotice::kHeartbeat) != packets.end();
  }
  bool SocketEnds() const { return socket_closed && !place.child_holds_socket; }
  bool PidfdIsReady() const { return place.has_pidfd && pidfd_open && ended && !Is("socket_only"); }
  bool SocketIsReady() const { return socket_open && (!packets.empty() || reset || SocketEnds()); }
};

// What the thread does. A step of it ends after one question to a Port. The next step begins anew,
// from the record as it was, and gets the same answers before it asks the next question.
enum class Doing : char { kNothing, kSocket, kPidfd, kTick, kTickAfterOwnStop };
struct NextQuestion {
  char question;
};

struct World {
  struct Call {
    int peer;
    Told told;
  };
  std::vector<Peer> peers{};
  Doing doing = Doing::kNothing;
  int with = 0;           // with this peer
  std::string answers{};  // so far
  std::string at{};       // what they have led to: the same leads to the same
  bool armed = false;
  bool has_second = false, announced = false;  // a communicator that is new
  bool closes = false, closed = false;
  std::deque<Call> calls{};      // of the thread: it tells them one by one, with a lock
  std::deque<Call> announces{};  // only in variants: Announce() has that lock, too
  Told first[kMostPeers]{}, second[kMostPeers]{};  // what the communicators know
  std::string error{};

  void Fail(const std::string& what) {
    if (error.empty()) error = what;
  }
  std::string Key() const;

  // The peers.
  using Action = std::pair<const char*, std::function<void(Peer&)>>;
  std::vector<Action> ActionsOf(int p, int stops) const;
  static std::vector<Action> ActionsOfSecond(const Peer& peer);

  // The watch's thread.
  void Go(bool at_once);
  void Do(struct Port& port);
  void DoAtOnce(Doing what, int p) {
    doing = what;
    with = p;
    Go(true);
  }
  void Change(int p);
  void Deliver();

  // The program of process 0.
  void Arm();
  void Announce();

  void Settle();

  // The thread has a lock from its look to the last call, and another one only for the look.
  bool ThreadLooks() const { return doing != Doing::kNothing; }
  bool ThreadIsFree() const { return !ThreadLooks() && calls.empty(); }
};

std::string KeyOfRecord(const Peer& peer) {
  const jin::PeerRecord& r = peer.record;
  return {static_cast<char>(r.state), static_cast<char>(r.reason),
          static_cast<char>(r.ended << 1 | (r.heard == kNow) << 2),
          static_cast<char>(peer.socket_open | peer.pidfd_open << 1 | !r.text.empty() << 2)};
}

std::string World::Key() const {
  std::string key;
  const auto add = [&key](auto... values) { (key.push_back(static_cast<char>(values)), ...); };
  const auto add_told = [&](const Told& told) { add(told.state, told.reason); };
  for (size_t p = 0; p < peers.size(); ++p) {
    const Peer& peer = peers[p];
    add(peer.finished << 1 | peer.shut_down << 2 | peer.failed << 3,
        peer.stopped | peer.exits << 1 | peer.socket_closed << 2 | peer.ended << 3 |
            peer.reaped << 4 | peer.reset << 5,
        peer.stops, peer.packets.size());
    for (const PeerNotice notice : peer.packets) add(notice);
    key += KeyOfRecord(peer);
    add_told(first[p]);
    add_told(second[p]);
  }
  add(doing, with, at.size());
  key += at;
  add(armed | has_second << 1 | announced << 2 | closes << 3 | closed << 4, calls.size());
  for (const auto* list : {&calls, &announces}) {
    for (const Call& call : *list) {
      add(call.peer);
      add_told(call.told);
    }
    add('.');
  }
  return key;
}

// A second peer does less: it says one thing at most, and ends at once.
std::vector<World::Action> World::ActionsOfSecond(const Peer& peer) {
  std::vector<Action> actions;
  if (peer.exits) return actions;
  if (!peer.finished && !peer.failed) {
    actions.push_back({"finishes", [](Peer& p) {
                         p.packets.push_back(PeerNotice::kFinished);
                         p.finished = true;
                       }});
    actions.push_back({"fails", [](Peer& p) {
                         p.packets.push_back(PeerNotice::kFailed);
                         p.failed = true;
                       }});
  }
  actions.push_back({"ends", [](Peer& p) { p.exits = p.socket_closed = p.ended = true; }});
  return actions;
}

std::vector<World::Action> World::ActionsOf(int p, int stops) const {
  const Peer& peer = peers[p];
  if (p > 0) return ActionsOfSecond(peer);
  std::vector<Action> actions;
  const auto says = [](PeerNotice notice) {
    return [notice](Peer& p) {
      if (!p.socket_closed) p.packets.push_back(notice);
    };
  };
  if (peer.Runs() && !peer.socket_closed) {
    // A second heartbeat that is not read, or is read in the same look, says no more than the
    // first.
    const bool was_read =
        with == p && answers.find(static_cast<char>(PeerNotice::kHeartbeat)) != answers.npos;
    if (!peer.HasHeartbeat() && !was_read) {
      actions.push_back({"beats", says(PeerNotice::kHeartbeat)});
    }
    if (!peer.finished) {
      actions.push_back({"finishes", [=](Peer& p) {
                           says(PeerNotice::kFinished)(p);
                           p.finished = true;
                         }});
    }
    if (!peer.failed) {
      actions.push_back({"fails", [=](Peer& p) {
                           says(PeerNotice::kFailed)(p);
                           p.failed = true;
                         }});
    }
    // With and without having read all that process 0 has sent.
    for (const bool reset : {false, true}) {
      actions.push_back({reset ? "closes, with unread data" : "closes", [=](Peer& p) {
                           says(PeerNotice::kShutdown)(p);
                           p.shut_down = true;
                           p.socket_closed = true;
                           p.reset = reset;
                         }});
    }
  }
  if (peer.Runs() && peer.stops < stops) {
    actions.push_back({"stops", [](Peer& p) {
                         p.stopped = true;
                         ++p.stops;
                       }});
  }
  if (peer.stopped) actions.push_back({"goes on", [](Peer& p) { p.stopped = false; }});
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
  } else if (!peer.ended) {
    actions.push_back({"ends", [](Peer& p) { p.ended = true; }});
  } else if (!peer.reaped) {
    actions.push_back({"is reaped", [](Peer& p) { p.reaped = true; }});
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
  bool IsExiting() {
    const bool exits = Answer('x', [this]() -> char {
      return place.shows_in_proc && peer().exits && !peer().reaped && !Is("socket_only");
    });
    if (Is("proc_last")) hides_packets = exits;
    return exits;
  }
  jin::PeerRecord::Time Now() { return kNow; }
  bool HasPidfd() { return place.has_pidfd && peer().pidfd_open; }
  void CloseSocket() { peer().socket_open = false; }
  void ClosePidfd() { peer().pidfd_open = false; }
  void Tell() { world.Change(p); }
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
    for (const Call& call : calls) {
      at.push_back(static_cast<char>(call.told.state));
      at.push_back(static_cast<char>(call.told.reason));
    }
    peers[with].record = before.record;
    peers[with].socket_open = before.socket_open;
    peers[with].pidfd_open = before.pidfd_open;
    calls.clear();
    answers = port.given;
  }
}

void Forget(jin::PeerRecord& record) {
  record.state = PeerState::kPresent;
  record.reason = PeerReason::kNone;
}

void World::Do(Port& port) {
  jin::PeerRecord& record = peers[with].record;
  switch (doing) {
    case Doing::kNothing:
      break;
    case Doing::kSocket: {
      const jin::PeerRecord before = record;
      const bool tells_twice = Is("tells_twice") && record.state == PeerState::kGone;
      if (tells_twice) Forget(record);
      const bool was_stopped = record.state == PeerState::kStopped;
      record.OnSocket(port);
      if (tells_twice && record.state == PeerState::kPresent) {
        record.state = before.state;
        record.reason = before.reason;
      }
      if (Is("stays_stopped") && was_stopped && record.state == PeerState::kPresent) {
        record.state = PeerState::kStopped;
        record.reason = PeerReason::kSilent;
        calls.clear();
      }
      if (Is("no_goodbye") && record.state == PeerState::kGone) record.state = PeerState::kPresent;
      break;
    }
    case Doing::kPidfd:
      if (Is("last_fault") && record.state == PeerState::kDead && !record.ended) {
        Forget(record);
      }
      port.hides_packets = Is("pidfd_first");
      record.OnEnd(port);
      break;
    case Doing::kTick:
    case Doing::kTickAfterOwnStop:
      if (Is("stops_dead") && record.state == PeerState::kDead && record.heard == kLongAgo) {
        record.state = PeerState::kStopped;
        record.reason = PeerReason::kSilent;
        port.Tell();
      }
      if (Is("proc_last")) record.OnSocket(port);
      port.hides_packets = Is("silence_first");
      record.OnTick(port, kNow, kSilent, doing == Doing::kTickAfterOwnStop);
      break;
  }
}

// The record has a new state.
void World::Change(int p) {
  const Peer& peer = peers[p];
  const PeerReason reason = peer.record.reason;
  const bool said_goodbye = peer.finished || peer.shut_down;
  switch (peer.record.state) {
    case PeerState::kPresent:
      break;
    case PeerState::kGone:
      if (reason == PeerReason::kFinished   ? !peer.finished
          : reason == PeerReason::kShutdown ? !peer.shut_down
                                            : true) {
        Fail("wrong: a peer is gone for another reason");
      }
      break;
    case PeerState::kStopped:
      if (peer.stops == 0 && !peer.exits) Fail("wrong: a peer that ran is stopped");
      break;
    case PeerState::kDead:
      if (reason == PeerReason::kFailed) {
        if (!peer.failed || peer.record.text != "why") Fail("wrong: a failure without a text");
      } else if (reason != PeerReason::kNoGoodbye) {
        Fail("wrong: a peer is dead for another reason");
      } else if (said_goodbye) {
        Fail("wrong: a peer that said goodbye is dead");
      } else if (peer.failed) {
        Fail("wrong: a peer is dead, and not for the reason that it gave");
      } else if (!peer.exits) {
        Fail("wrong: a peer that runs is dead");
      }
      break;
  }
  calls.push_back({p, {peer.record.state, reason}});
}

// The thread tells of a change.
void World::Deliver() {
  if (closed) return Fail("wrong: a callback after Close()");
  const Call call = calls.front();
  calls.pop_front();
  Told& known = first[call.peer];
  const PeerState to = call.told.state;
  bool allowed = false;
  switch (known.state) {
    case PeerState::kPresent:
      allowed = to != PeerState::kPresent;
      break;
    case PeerState::kStopped:
      allowed = to != PeerState::kStopped;
      break;
    case PeerState::kGone:  // then its program failed
      allowed = to == PeerState::kDead && call.told.reason == PeerReason::kFailed;
      break;
    case PeerState::kDead:
      break;
  }
  if (!allowed) Fail("wrong: a change that can't follow the last one");
  known = call.told;
  if (has_second) second[call.peer] = call.told;
}

void World::Arm() {
  armed = true;
  for (Peer& peer : peers) {
    peer.record.heard = kNow;
    if (Is("forgets_before_arm")) peer.packets.clear();
  }
}

void World::Announce() {
  announced = true;
  for (size_t p = 0; p < peers.size(); ++p) {
    const jin::PeerRecord& record = peers[p].record;
    if (record.state == PeerState::kPresent) continue;
    announces.push_back({static_cast<int>(p), {record.state, record.reason}});
  }
}

// What will be known if nobody does anything more, but those that run send heartbeats.
void World::Settle() {
  if (!armed) Arm();
  const bool with_second = has_second;
  for (int round = 0; round < 4; ++round) {
    while (!calls.empty()) Deliver();
    if (with_second && !announced) Announce();
    for (; !announces.empty(); announces.pop_front()) {
      second[announces.front().peer] = announces.front().told;
    }
    for (size_t p = 0; p < peers.size(); ++p) {
      Peer& peer = peers[p];
      const int number = static_cast<int>(p);
      if (peer.exits) peer.socket_closed = peer.ended = true;
      if (peer.Runs() && !peer.socket_closed) peer.packets.push_back(PeerNotice::kHeartbeat);
      peer.record.heard = kLongAgo;
      if (peer.SocketIsReady()) DoAtOnce(Doing::kSocket, number);
      if (peer.PidfdIsReady()) DoAtOnce(Doing::kPidfd, number);
      DoAtOnce(Doing::kTick, number);
    }
  }
  while (!calls.empty()) Deliver();
  for (size_t p = 0; p < peers.size(); ++p) {
    const Peer& peer = peers[p];
    const Told told = first[p];
    const bool goes = peer.finished || peer.shut_down;
    // /proc may have forgotten the process before anybody asked.
    const bool shows = place.has_pidfd || !place.child_holds_socket;
    const PeerState known = told.state;
    if (told != Told{peer.record.state, peer.record.reason} || (with_second && second[p] != told)) {
      Fail("wrong: a communicator knows another state than the watch");
    } else if (peer.failed) {
      if (told.reason != PeerReason::kFailed) Fail("wrong: nobody knows of a failure");
    } else if (peer.exits && shows) {
      if (known != (goes ? PeerState::kGone : PeerState::kDead)) {
        Fail("a wait without end: nobody knows that a process has ended");
      }
    } else if (peer.exits) {
      if (known == PeerState::kPresent) Fail("a wait without end: an end, and not even a silence");
    } else if (peer.finished || peer.shut_down) {
      if (known != PeerState::kGone) Fail("a wait without end: nobody has heard a goodbye");
    } else if (peer.stopped) {
      if (known != PeerState::kStopped) Fail("a wait without end: nobody knows of a stop");
    } else if (known != PeerState::kPresent) {
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
    if (error.empty() && !world.closes && world.ThreadIsFree()) {
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
    const bool is_free = world.ThreadIsFree();
    if (!world.calls.empty()) One(world, "the thread calls", [](World& w) { w.Deliver(); });
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
      const bool is_looked_at = world.ThreadLooks() && world.with == p;
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
    if (world.ThreadLooks()) {
      One(world, "the thread looks on", [](World& w) { w.Go(false); });
    } else {
      One(world, "the program begins to close", [](World& w) { w.closes = true; });
    }
    if (!world.has_second) {
      One(world, "the program makes a communicator", [](World& w) { w.has_second = true; });
    } else if (!world.announced && !world.ThreadLooks() && (is_free || Is("announce_any_time"))) {
      One(world, "the program announces", [](World& w) {
        w.Announce();
        if (!Is("announce_any_time")) Take(w);
      });
    }
    if (!world.announces.empty()) One(world, "Announce() calls", [](World& w) { Take(w); });
    if (!is_free) return;
    for (int p = 0; p < peers; ++p) {
      const Peer& peer = world.peers[p];
      const auto begins = [&](Doing doing, const char* what) {
        One(world, std::string("the thread ") + what + " process " + std::to_string(p + 1),
            [=](World& w) {
              w.doing = doing;
              w.with = p;
              w.Go(false);
            });
      };
      if (peer.SocketIsReady()) begins(Doing::kSocket, "looks at the socket of");
      if (peer.PidfdIsReady()) begins(Doing::kPidfd, "looks at the pidfd of");
      if (peer.record.ended && !Is("stops_dead")) continue;
      begins(Doing::kTick, "ticks for");
      if (peer.record.heard == kLongAgo) {
        begins(Doing::kTickAfterOwnStop, "ticks after a gap for");
      }
    }
  }

  // Announce() tells all.
  static void Take(World& world) {
    for (; !world.announces.empty(); world.announces.pop_front()) {
      const auto& call = world.announces.front();
      world.second[call.peer] = call.told;
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
  for (int kind = 0; kind < 8; ++kind) {
    place = {(kind & 1) != 0, (kind & 2) == 0, (kind & 4) == 0};
    // The usual one, and one where only the pidfd tells of an end.
    if (quick && kind != 0 && kind != 5) continue;
    Search search(processes - 1, stops);
    const std::string error = search.Run();
    states += search.states();
    steps += search.steps();
    if (!error.empty()) {
      printf("%s", error.c_str());
      printf("  (a child holds the socket: %d, pidfd: %d, /proc: %d)\n", place.child_holds_socket,
             place.has_pidfd, place.shows_in_proc);
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
