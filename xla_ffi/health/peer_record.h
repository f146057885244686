// What a process knows of one of its peers: its state (peer_table.h), and when that changes.
//
// It has no sockets: a Port gives it what there is. tests/native/model/health_model.cc runs it
// against peers that end and stop at any time. The rules:
//
//   The socket is read until it is empty after the end of a process is known, and before that end
//   or a silence is judged. So a goodbye, which comes before the end, is found before it.
//   A process that was stopped itself can't judge a silence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "peer_message.h"
#include "peer_table.h"

namespace jax_intranode {

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
//   Clock::time_point Now()
//   bool HasPidfd()                                whether another event tells of the process's end
//   void CloseSocket()
//   void ClosePidfd()
//   void OnNote(const PeerMessage&)                a packet that says something about its waits
//   void OnChange()                                the state is new
struct PeerRecord {
  PeerState state = PeerState::kUnheard;
  Clock::time_point since{};  // of the state
  Clock::time_point heard{};
  std::string text{};  // of its failure
  bool ended = false;  // its process is no more

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

  // From time to time. `was_stopped`: this process was stopped itself.
  template <class Port>
  void OnTick(Port& port, Clock::time_point now, Clock::duration silent, bool was_stopped) {
    if (ended) return;
    if (was_stopped) heard = now;
    if (port.IsExiting()) {
      OnEnd(port);
    } else if (now - heard > silent && Read(port) && now - heard > silent) {
      On(port, PeerEvent::kSilence);
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
          if (!message) break;
          if (message->notice == PeerNotice::kFailed && text.empty()) text = message->text;
          On(port, EventOf(message->notice));
          port.OnNote(*message);
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

  // The connection has come to its end, or the process has ended, too.
  template <class Port>
  void Lose(Port& port, bool process_ended) {
    if (ended) return;
    ended = process_ended || !port.HasPidfd();
    port.CloseSocket();
    if (ended) port.ClosePidfd();
    On(port, PeerEvent::kEnds);
  }

  template <class Port>
  void On(Port& port, PeerEvent event) {
    const PeerState before = state;
    state = StateAfter(state, event);
    if (state == before) return;
    since = port.Now();
    port.OnChange();
  }
};

}  // namespace jax_intranode
