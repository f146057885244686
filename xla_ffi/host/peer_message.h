// What the processes of a mesh write to each other through the sockets of peer_watch.h.
//
// Each message is one packet. A reader checks its size and every field, and takes nothing from it
// that it would use as an address, a size or code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace jax_intranode {

// The first packet in each direction. A pidfd of the sender travels with it.
struct PeerHello {
  static constexpr uint32_t kMagic = 0x57494e4a;  // "JNIW"
  uint32_t magic;
  int32_t process;
  int32_t pid;
  uint8_t secret[32];
};
static_assert(sizeof(PeerHello) == 44);

enum class PeerNotice : uint8_t {
  kHeartbeat = 'h',
  kFinished = 'g',  // the program has come to its end, and nothing of it runs any more
  kShutdown = 's',  // the process has called shutdown()
  kFailed = 'f',    // the process ends because of an exception; the text says which
};

struct PeerMessage {
  static constexpr size_t kMaxText = 500;
  PeerNotice notice;
  std::string text;  // printable ASCII
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
  const auto notice = static_cast<PeerNotice>(packet[0]);
  switch (notice) {
    case PeerNotice::kHeartbeat:
    case PeerNotice::kFinished:
    case PeerNotice::kShutdown:
    case PeerNotice::kFailed:
      return PeerMessage{notice, Printable(packet.substr(1))};
  }
  return std::nullopt;
}

inline std::string Packet(PeerNotice notice, std::string_view text = "") {
  return static_cast<char>(notice) + Printable(text);
}

}  // namespace jax_intranode
