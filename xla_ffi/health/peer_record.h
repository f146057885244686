// What a process knows of one of its peers: its state (peer_table.h), and when that changes.
//
// It has no sockets: a Port gives it what there is. tests/native/peer_record_test.cc runs it
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
//   bool HasEnded()                                whether /proc says that the process ends
//   Clock::time_point Now()
//   void Close()                                   closes the socket
//   void OnNote(const PeerMessage&)                a packet that says something about its waits
//   void OnChange()                                the state is new
struct PeerRecord {
  PeerState state = PeerState::kUnheard;
  Clock::time_point since{};  // of the state
  Clock::time_point heard{};
  std::string text{};  // of its failure
  bool over = false;   // nothing more comes from it

  // Whether the process is no more. One that has left closes its socket, and lives on.
  bool HasEnded() const { return over && state != PeerState::kLeft; }

  // The socket has something, or it has ended.
  template <class Port>
  void OnSocket(Port& port) {
    if (!over && !Read(port)) End(port);
  }

  // From time to time. `was_stopped`: this process was stopped itself.
  template <class Port>
  void OnTick(Port& port, Clock::time_point now, Clock::duration silent, bool was_stopped) {
    if (over) return;
    if (was_stopped) heard = now;
    if (port.HasEnded()) {
      Read(port);
      End(port);
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
      const PeerNews news = port.Receive(&message);
      if (news == PeerNews::kNothing || news == PeerNews::kEnd) return news == PeerNews::kNothing;
      if (news == PeerNews::kPacket) heard = port.Now();
      if (!message) continue;
      if (message->notice == PeerNotice::kFailed && text.empty()) text = message->text;
      On(port, EventOf(message->notice));
      port.OnNote(*message);
    }
  }

  template <class Port>
  void End(Port& port) {
    over = true;
    port.Close();
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
