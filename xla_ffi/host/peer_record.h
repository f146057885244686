// What a process knows of one of its peers, and when that changes.
//
// This is the part of the watch (peer_watch.h) that decides. It has no sockets: a Port gives it
// what there is, and tells on what it decides. tests/native/model/watch_model.cc runs it against
// peers that end and stop at any time. The rules:
//
//   The socket is read until it is empty after the end of a process is known, and before that end
//   or a silence is judged. So a goodbye, which comes before the end, is found before it.
//   A peer that ends is dead, unless it has finished or has called shutdown().
//   A peer that has failed is dead, whatever it said before, and stays so for that reason.
//   A peer is stopped only if it was present, and present again only if it was stopped.
//   Each change is told once.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "peer_event.h"
#include "peer_message.h"

namespace jax_intranode {

// Why a peer is in its state.
enum class PeerReason : uint8_t {
  kNone,
  kNoGoodbye,
  kFailed,
  kFinished,
  kShutdown,
  kSilent,
};

// What a look at a socket finds.
enum class PeerNews : uint8_t {
  kPacket,
  kNothing,
  kAgain,  // look again
  kEnd,
};

// A Port has:
//   PeerNews Receive(std::optional<PeerMessage>*)  the next packet; nullopt if it makes no sense
//   bool IsExiting()                               whether /proc says that the process ends
//   Time Now()
//   bool HasPidfd()                                whether another event tells of the process's end
//   void CloseSocket()
//   void ClosePidfd()
//   void Tell()                                    of the state that is new
struct PeerRecord {
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  PeerState state = PeerState::kPresent;
  PeerReason reason = PeerReason::kNone;
  std::string text;    // of its failure
  bool ended = false;  // its process is no more
  Time heard{};

  // The socket has something, or it has ended.
  template <class Port>
  void OnSocket(Port& port) {
    if (!Read(port)) Lose(port, false);
  }

  // The process has ended.
  template <class Port>
  void OnEnd(Port& port) {
    Read(port);
    Lose(port, true);
  }

  // From time to time. `was_stopped`: this process was stopped itself, and can't judge a silence.
  template <class Port>
  void OnTick(Port& port, Time now, Clock::duration silent, bool was_stopped) {
    if (ended) return;
    if (was_stopped) heard = now;
    const auto is_silent = [&] { return state == PeerState::kPresent && now - heard > silent; };
    if (port.IsExiting()) {
      OnEnd(port);
    } else if (is_silent() && Read(port) && is_silent()) {
      Change(port, PeerState::kStopped, PeerReason::kSilent);
    }
  }

 private:
  // Reads all messages that are there; returns whether the socket is still open.
  template <class Port>
  bool Read(Port& port) {
    for (;;) {
      std::optional<PeerMessage> message;
      switch (port.Receive(&message)) {
        case PeerNews::kPacket:
          heard = port.Now();
          if (message) OnMessage(port, *message);
          break;
        case PeerNews::kAgain:
          break;
        case PeerNews::kNothing:
          return true;
        case PeerNews::kEnd:
          return false;
      }
    }
  }

  template <class Port>
  void OnMessage(Port& port, const PeerMessage& message) {
    if (state == PeerState::kStopped) Change(port, PeerState::kPresent, PeerReason::kNone);
    switch (message.notice) {
      case PeerNotice::kHeartbeat:
        break;
      case PeerNotice::kFinished:
        Change(port, PeerState::kGone, PeerReason::kFinished);
        break;
      case PeerNotice::kShutdown:
        Change(port, PeerState::kGone, PeerReason::kShutdown);
        break;
      case PeerNotice::kFailed:
        if (state != PeerState::kDead) text = message.text;
        Change(port, PeerState::kDead, PeerReason::kFailed);
        break;
    }
  }

  // The connection has come to its end, or the process has ended, too.
  template <class Port>
  void Lose(Port& port, bool process_ended) {
    if (ended) return;
    ended = process_ended || !port.HasPidfd();
    port.CloseSocket();
    if (ended) port.ClosePidfd();
    if (state != PeerState::kGone) Change(port, PeerState::kDead, PeerReason::kNoGoodbye);
  }

  template <class Port>
  void Change(Port& port, PeerState to, PeerReason why) {
    // Each state is told once, and the first fault is the one to tell of.
    if (state == to || state == PeerState::kDead) return;
    state = to;
    reason = why;
    port.Tell();
  }
};

}  // namespace jax_intranode
