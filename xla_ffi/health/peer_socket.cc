#include "peer_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "peer_message.h"

namespace jax_intranode {
namespace {

std::string ErrnoText(const std::string& what) {
  return what + ": " + std::generic_category().message(errno);
}

[[noreturn]] void Throw(const std::string& what) { throw std::runtime_error(what); }

int Milliseconds(Clock::duration time) {
  return static_cast<int>(std::max<int64_t>(
      0, std::chrono::duration_cast<std::chrono::milliseconds>(time).count() + 1));
}

socklen_t Fill(sockaddr_un* address, const std::string& name) {
  memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  if (name.empty() || name.size() > sizeof(address->sun_path) - 1) {
    Throw("an address of " + std::to_string(name.size()) + " bytes is not one of a Unix socket");
  }
  memcpy(address->sun_path + 1, name.data(), name.size());  // abstract: begins with a zero
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Why the process at the other end of a socket is no peer; empty if it may be one.
std::string CheckUser(int socket, int* pid) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return ErrnoText("reading a peer's credentials");
  }
  *pid = credentials.pid;
  if (credentials.uid == geteuid()) return "";
  return "it runs as user " + std::to_string(credentials.uid) + ", this process as user " +
         std::to_string(geteuid());
}

void SendHello(int socket, int process, const std::string& secret) {
  PeerHello hello{PeerHello::kMagic, process, getpid(), {}};
  memcpy(hello.secret, secret.data(), sizeof(hello.secret));
  if (send(socket, &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
    Throw(ErrnoText("sending a hello"));
  }
}

// Reads a peer's hello, which is there; nullopt if it is none. The kernel closes descriptors that
// come with it.
std::optional<PeerHello> ReceiveHello(int socket, const std::string& secret) {
  char packet[sizeof(PeerHello) + 1];  // one more, so that a longer packet shows
  const ssize_t size = recv(socket, packet, sizeof(packet), MSG_DONTWAIT);
  if (size < 0) return std::nullopt;
  std::optional<PeerHello> hello = ParseHello({packet, static_cast<size_t>(size)});
  if (!hello || memcmp(hello->secret, secret.data(), sizeof(hello->secret)) != 0) {
    return std::nullopt;
  }
  return hello;
}

}  // namespace

bool HasEnded(int pid) {
  char path[64], text[512];
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return errno == ENOENT;
  const size_t size = fread(text, 1, sizeof(text) - 1, file);
  fclose(file);
  text[size] = 0;
  const char* rest = strrchr(text, ')');  // the name before it may contain anything
  unsigned flags = 0;
  if (rest == nullptr || sscanf(rest, ") %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return false;
  return (flags & 4) != 0;
}

PeerSocket::PeerSocket(int process) : process_(process) {
  Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener.get() < 0) Throw(ErrnoText("creating a Unix socket"));
  // Not std::random_device, which calls a function that only the newest C libraries have.
  unsigned random[4];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) {
    Throw(ErrnoText("getting random bytes"));
  }
  char name[64];
  snprintf(name, sizeof(name), "jax_intranode.%d.%08x%08x%08x%08x", static_cast<int>(getpid()),
           random[0], random[1], random[2], random[3]);
  address_ = name;
  sockaddr_un address;
  const socklen_t size = Fill(&address, address_);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener.get(), 128) != 0) {
    Throw(ErrnoText("listening on a Unix socket"));
  }
  listener_ = std::move(listener);
}

std::vector<Connection> PeerSocket::Connect(const std::vector<PeerAddress>& peers,
                                            const std::string& secret, double timeout_s) {
  if (secret.size() != sizeof(PeerHello::secret)) Throw("a secret of a wrong size");
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(timeout_s));
  const auto name = [](const PeerAddress& peer) {
    return "process " + std::to_string(peer.process);
  };
  std::map<int, Connection> made;
  // Whose hello is awaited. All are heard at once, so that one who says nothing delays nobody.
  struct Other {
    Fd socket;
    int pid;
    int process;  // to which this one has connected; -1: it has connected to this one
    Clock::time_point until;
  };
  std::vector<Other> others;

  // Each process connects to those before it and is connected to by those after it. Nobody waits
  // before it has connected, so nobody waits in a circle.
  for (const PeerAddress& peer : peers) {
    if (peer.process >= process_) continue;
    Fd out(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (out.get() < 0) Throw(ErrnoText("creating a Unix socket"));
    const timeval limit{static_cast<time_t>(timeout_s) + 1, 0};
    setsockopt(out.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    sockaddr_un address;
    const socklen_t size = Fill(&address, peer.address);
    while (connect(out.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      if (errno != EINTR || Clock::now() > end) Throw(ErrnoText("connecting to " + name(peer)));
    }
    int pid = 0;
    if (const std::string why = CheckUser(out.get(), &pid); !why.empty()) {
      Throw(name(peer) + " can't be watched: " + why);
    }
    SendHello(out.get(), process_, secret);
    others.push_back({std::move(out), pid, peer.process, end});
  }
  const auto answer = [&](Other& other) {
    const auto hello = ReceiveHello(other.socket.get(), secret);
    for (const PeerAddress& peer : peers) {
      const bool is_it =
          other.process < 0 ? peer.process > process_ : peer.process == other.process;
      if (!hello || !is_it || hello->process != peer.process || made.contains(peer.process)) {
        continue;
      }
      if (other.process < 0) SendHello(other.socket.get(), process_, secret);
      const int pid = other.pid > 0 ? other.pid : hello->pid;
      const bool pid_is_known = other.pid > 0 && !HasEnded(other.pid);
      made.emplace(peer.process, Connection{peer.process, pid, pid_is_known, peer.device_ids,
                                            std::move(other.socket)});
    }
    if (other.process >= 0 && !made.contains(other.process)) {
      Throw("process " + std::to_string(other.process) + " did not answer");
    }
  };
  while (made.size() < peers.size()) {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    auto until = end;
    for (const Other& other : others) {
      polled.push_back({other.socket.get(), POLLIN, 0});
      until = std::min(until, other.until);
    }
    const int ready = poll(polled.data(), polled.size(), Milliseconds(until - Clock::now()));
    if (ready < 0) {
      if (errno != EINTR) Throw(ErrnoText("waiting for the peers' connections"));
      continue;
    }
    const auto now = Clock::now();
    std::vector<Other> silent;
    for (size_t i = 0; i < others.size(); ++i) {
      if (polled[i + 1].revents != 0) {
        answer(others[i]);
      } else if (now < others[i].until) {
        silent.push_back(std::move(others[i]));
      }
    }
    others = std::move(silent);
    if (polled[0].revents != 0) {
      Fd in(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      int pid = 0;
      if (in.get() < 0) {
        // For instance because no descriptor is free. The connection stays ready: look again later.
        std::this_thread::sleep_for(kAcceptsAgain);
      } else if (CheckUser(in.get(), &pid).empty()) {
        others.push_back({std::move(in), pid, -1, now + kHelloPatience});
      }
    }
    for (const PeerAddress& peer : peers) {
      if (now < end || made.contains(peer.process)) continue;
      Throw(name(peer) + (peer.process < process_ ? " did not answer" : " did not connect") +
            " in time");
    }
  }
  listener_.Reset();
  std::vector<Connection> connections;
  for (auto& [process, connection] : made) connections.push_back(std::move(connection));
  return connections;
}

}  // namespace jax_intranode
