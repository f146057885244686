// Feeds any bytes to what parses the input of peers: packets of the watch (host/peer_message.h) and
// notes in shared memory (host/wait_note.h). Meant for AddressSanitizer and UBSan.
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

#include "xla_ffi/host/peer_message.h"
#include "xla_ffi/host/wait_note.h"

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

// What the watch does with a packet.
void Parse(const std::string& packet) {
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
  }
}

// What a group does with a note that a peer has left in its region.
void ReadNote(const std::string& bytes) {
  alignas(64) static char region[jin::kHeaderBytes];
  memset(region, 0, sizeof region);
  char* const note = reinterpret_cast<char*>(jin::WaitNote::In(region));
  memcpy(note, bytes.data(), std::min(bytes.size(), sizeof(jin::WaitNote)));
  if (const auto content = jin::WaitNote::In(region)->Read()) {
    Check(content->call.size() < sizeof(jin::WaitNote), "a call that is too long");
    for (const char c : content->call) {
      Check(static_cast<unsigned char>(c) >= ' ', "a call with control characters");
    }
  }
}

void Feed(const std::string& bytes) {
  Parse(bytes);
  ReadNote(bytes);
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
  std::string note(8, '\0');
  note[0] = 2;                       // a version
  note += std::string(8, '\1');      // a site
  note += '\1' + std::string(7, 0);  // a count
  note += "psum of 4096 bytes (model.py:12)";
  const std::vector<std::string> valid = {
      std::string(reinterpret_cast<const char*>(&hello), sizeof hello),
      jin::Packet(jin::PeerNotice::kHeartbeat),
      jin::Packet(jin::PeerNotice::kFinished),
      jin::Packet(jin::PeerNotice::kShutdown),
      jin::Packet(jin::PeerNotice::kFailed, "ValueError: no such file"),
      jin::Packet(jin::PeerNotice::kFailed, std::string(jin::PeerMessage::kMaxText, 'x')),
      note,
  };
  size_t parsed = 0;
  for (const std::string& packet : valid) {
    Feed(packet);
    parsed += jin::ParseHello(packet) || jin::ParseMessage(packet);
  }
  Check(parsed == valid.size() - 1, "a valid packet is refused");
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
