// Feeds any bytes to what parses the packets of peers (health/peer_message.h). Meant for
// AddressSanitizer and UBSan.
//
//   peer_input_fuzz [rounds]
//
// changes valid packets at random, in the same way in each run. With clang it can search by itself:
//
//   clang++ -std=c++20 -g -DJIN_LIBFUZZER -fsanitize=fuzzer,address,undefined -I.
//     tests/native/peer_input_fuzz.cc -o fuzz && ./fuzz -max_len=600 -max_total_time=60
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "xla_ffi/health/peer_message.h"

namespace jin = jax_intranode;

namespace {

void Check(bool holds, const char* what) {
  if (holds) return;
  printf("%s\n", what);
  std::abort();
}

bool IsPrintable(const std::string& text) {
  for (const char c : text) {
    if (c < ' ' || c > '~') return false;
  }
  return true;
}

// What the monitor does with a packet.
void Feed(const std::string& packet) {
  if (const auto hello = jin::ParseHello(packet)) {
    Check(packet.size() == sizeof(jin::PeerHello), "a hello of another size");
    Check(hello->process >= 0 && hello->pid >= 0, "a hello with a negative number");
  }
  if (const auto message = jin::ParseMessage(packet)) {
    Check(message->text.size() <= jin::PeerMessage::kMaxText, "a text that is too long");
    Check(IsPrintable(message->text), "a text that can't be printed");
    // A message that is written again stays the same.
    const auto again = jin::ParseMessage(jin::Packet(message->notice, message->text));
    Check(again && again->notice == message->notice && again->text == message->text,
          "a message that changes");
    if (const auto note = jin::ParseNote(message->text)) {
      const auto same = jin::ParseNote(jin::TextOf(*note));
      Check(same && same->device == note->device && same->missing == note->missing &&
                same->group == note->group && same->site == note->site &&
                same->count == note->count && same->call == note->call,
            "a note that changes");
    }
  }
}

}  // namespace

#ifdef JIN_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Feed({reinterpret_cast<const char*>(data), size});
  return 0;
}

#else

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 100000;
  std::mt19937 random(25);
  jin::PeerHello hello{jin::PeerHello::kMagic, 3, 1234, {}};
  const std::vector<std::string> valid = {
      std::string(reinterpret_cast<const char*>(&hello), sizeof hello),
      jin::Packet(jin::PeerNotice::kHeartbeat),
      jin::Packet(jin::PeerNotice::kFinished),
      jin::Packet(jin::PeerNotice::kShutdown),
      jin::Packet(jin::PeerNotice::kFailed, "ValueError: no such file"),
      jin::Packet(jin::PeerNotice::kFailed, std::string(jin::PeerMessage::kMaxText, 'x')),
      jin::Packet(jin::PeerNotice::kBarrier, "1"),
      jin::Packet(jin::PeerNotice::kWaits,
                  jin::TextOf({-1, 7, ~0ull, 1, 2, "psum of 4096 bytes (model.py:12)"})),
  };
  size_t parsed = 0;
  for (const std::string& packet : valid) {
    Feed(packet);
    parsed += jin::ParseHello(packet) || jin::ParseMessage(packet);
  }
  Check(parsed == valid.size(), "a valid packet is refused");
  for (int round = 0; round < rounds; ++round) {
    std::string bytes = valid[random() % valid.size()];
    for (int changes = 1 + random() % 4; changes > 0; --changes) {
      const size_t at = bytes.empty() ? 0 : random() % bytes.size();
      switch (random() % 6) {
        case 0:
          bytes.insert(at, 1 + random() % 40, static_cast<char>(random()));
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes += valid[random() % valid.size()];
          break;
        default:
          if (!bytes.empty()) bytes[at] = static_cast<char>(random());
      }
    }
    Feed(bytes);
  }
  printf("done\n");
  return 0;
}

#endif
