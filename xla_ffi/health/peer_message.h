// What the processes of a mesh write to each other through the sockets of monitor.h.
//
// Each message is one packet. A reader checks its size and every field, and takes nothing from it
// that it would use as an address, a size or code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "peer_table.h"

namespace jax_intranode {

// The first packet in each direction.
struct PeerHello {
  static constexpr uint32_t kMagic = 0x57494e4a;  // "JNIW"
  uint32_t magic;
  int32_t process;
  int32_t pid;
  uint8_t secret[32];
};
static_assert(sizeof(PeerHello) == 44);

// The first byte of a packet. Each of them shows that the peer runs.
enum class PeerNotice : uint8_t {
  kHeartbeat = 'h',
  kFinished = 'g',
  kGoesOn = 'r',
  kShutdown = 's',
  kFailed = 'f',   // the text says why
  kWaits = 'w',    // a rank waits; the text is a WaitNote
  kBarrier = 'b',  // it waits in JAX's last barrier, or, without a text, no more
};

struct PeerMessage {
  static constexpr size_t kMaxText = 500;
  PeerNotice notice;
  std::string text;  // printable ASCII
};

// A rank waits for another one.
struct WaitNote {
  int64_t device = 0;   // that waits
  int64_t missing = 0;  // for this one
  uint64_t group = 0;   // names the communicator's group
  uint64_t site = 0;    // the call
  uint64_t count = 0;   // how often the site had been called before
  std::string call{};   // for messages
};

inline std::optional<PeerHello> ParseHello(std::string_view packet) {
  PeerHello hello;
  if (packet.size() != sizeof(hello)) return std::nullopt;
  memcpy(&hello, packet.data(), sizeof(hello));
  if (hello.magic != PeerHello::kMagic || hello.process < 0 || hello.pid < 0) return std::nullopt;
  return hello;
}

inline std::string Printable(std::string_view text) {
  std::string printable(text.substr(0, PeerMessage::kMaxText));
  for (char& c : printable) {
    if (c < ' ' || c > '~') c = '?';
  }
  return printable;
}

inline std::optional<PeerMessage> ParseMessage(std::string_view packet) {
  if (packet.empty() || packet.size() > 1 + PeerMessage::kMaxText) return std::nullopt;
  if (std::string_view("hgrsfwb").find(packet[0]) == std::string_view::npos) return std::nullopt;
  return PeerMessage{static_cast<PeerNotice>(packet[0]), Printable(packet.substr(1))};
}

inline std::string Packet(PeerNotice notice, std::string_view text = "") {
  return static_cast<char>(notice) + Printable(text);
}

// The event of a packet.
inline PeerEvent EventOf(PeerNotice notice) {
  switch (notice) {
    case PeerNotice::kFinished:
      return PeerEvent::kFinishes;
    case PeerNotice::kGoesOn:
      return PeerEvent::kGoesOn;
    case PeerNotice::kShutdown:
      return PeerEvent::kLeaves;
    case PeerNotice::kFailed:
      return PeerEvent::kFails;
    default:
      return PeerEvent::kHeard;
  }
}

inline std::string TextOf(const WaitNote& note) {
  char numbers[128];
  snprintf(numbers, sizeof(numbers), "%llx %llx %llx %llx %llx ",
           static_cast<unsigned long long>(note.device),
           static_cast<unsigned long long>(note.missing),
           static_cast<unsigned long long>(note.group), static_cast<unsigned long long>(note.site),
           static_cast<unsigned long long>(note.count));
  return numbers + note.call;
}

inline std::optional<WaitNote> ParseNote(const std::string& text) {
  unsigned long long device, missing, group, site, count;
  int length = 0;
  if (sscanf(text.c_str(), "%16llx %16llx %16llx %16llx %16llx %n", &device, &missing, &group,
             &site, &count, &length) != 5 ||
      length == 0) {
    return std::nullopt;
  }
  return WaitNote{static_cast<int64_t>(device), static_cast<int64_t>(missing), group, site, count,
                  text.substr(length)};
}

}  // namespace jax_intranode
