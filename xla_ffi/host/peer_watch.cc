#include "peer_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "peer_message.h"
#include "peer_record.h"

namespace jax_intranode {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kTick = 250ms;
constexpr auto kHeartbeat = 1s;
// After such a gap between two ticks this process was stopped itself, and can't judge others.
constexpr auto kOwnGap = 5s;
// How long one who connects may take for its hello.
constexpr auto kHelloPatience = 2s;

std::string ErrnoText(const std::string& what) {
  return what + ": " + std::generic_category().message(errno);
}

[[noreturn]] void Throw(const std::string& what) { throw std::runtime_error(what); }

// A file descriptor that is closed with its owner.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { Reset(); }
  void Reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

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

// -1 where the kernel has no pidfds or does not allow them.
int OwnPidfd() { return static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)); }

// Whether a descriptor that a peer has sent is a pidfd of the process `pid`, as this PID namespace
// numbers it: 0 for one that it does not see.
bool IsPidfdOf(int fd, int pid) {
  // Signal 0 only asks. Whether it may be sent to that process does not matter here.
  if (syscall(SYS_pidfd_send_signal, fd, 0, nullptr, 0) != 0 && errno == EBADF) return false;
  char path[64];
  snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return true;  // /proc is missing, or another PID namespace's
  char line[128];
  bool is_other = false;
  while (fgets(line, sizeof(line), file) != nullptr) {
    int found;
    if (sscanf(line, "Pid: %d", &found) == 1) is_other = found != pid;
  }
  fclose(file);
  return !is_other;
}

// Whether the process is ending: the kernel's flag PF_EXITING of its first thread.
bool IsExiting(int pid) {
  char path[64], text[512];
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return false;
  const size_t size = fread(text, 1, sizeof(text) - 1, file);
  fclose(file);
  text[size] = 0;
  const char* rest = strrchr(text, ')');  // the name before it may contain anything
  unsigned flags = 0;
  if (rest == nullptr || sscanf(rest, ") %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return false;
  return (flags & 4) != 0;
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
  iovec part{&hello, sizeof(hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const Fd pidfd(OwnPidfd());
  if (const int fd = pidfd.get(); fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != sizeof(hello)) Throw(ErrnoText("sending a hello"));
}

// Reads a peer's hello and its pidfd; nullopt if it is none, or none comes until `end`.
std::optional<PeerHello> ReceiveHello(int socket, const std::string& secret, Clock::time_point end,
                                      Fd* pidfd) {
  for (;;) {
    pollfd poll_one{socket, POLLIN, 0};
    const int ready = poll(&poll_one, 1, Milliseconds(end - Clock::now()));
    if (ready > 0) break;
    if (ready == 0 || errno != EINTR) return std::nullopt;
  }
  char packet[sizeof(PeerHello) + 1];  // one more, so that a longer packet shows
  iovec part{packet, sizeof(packet)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  // The kernel has closed what did not fit; what did is to be closed here.
  for (cmsghdr* header = size >= 0 ? CMSG_FIRSTHDR(&message) : nullptr; header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= header->cmsg_len; at += sizeof(int)) {
      int fd;
      memcpy(&fd, CMSG_DATA(header) + at, sizeof(fd));
      *pidfd = Fd(fd);
    }
  }
  if (size < 0) return std::nullopt;
  std::optional<PeerHello> hello = ParseHello({packet, static_cast<size_t>(size)});
  if (!hello || memcmp(hello->secret, secret.data(), sizeof(hello->secret)) != 0) {
    return std::nullopt;
  }
  return hello;
}

}  // namespace

struct PeerWatch::Connection {
  int process;
  int pid;            // as this process sees it, or else as the peer says
  bool pid_is_known;  // visible here, so that /proc tells of it
  std::vector<int64_t> device_ids;
  Fd socket;
  Fd pidfd;
  PeerRecord record{};
  std::string what;

  std::string Name() const {
    return "process " + std::to_string(process) + " (pid " + std::to_string(pid) + ")";
  }
};

// The part of a watch that its thread uses. The lock of the thread guards it.
struct PeerWatch::State {
  Fd listener;  // until all have connected
  std::map<uint64_t, Connection> connections;
  PeerSink sink{};
  Clock::duration silent{};
};

class PeerWatch::Thread {
 public:
  // Never destroyed: the thread outlives static destruction.
  static Thread& Get() {
    static Thread* const thread = [] {
      auto* const made = new Thread;
      pthread_atfork([] { Get().BeforeFork(); }, [] { Get().AfterForkInParent(); },
                     [] { Get().AfterForkInChild(); });
      return made;
    }();
    return *thread;
  }

  // A forked child has no thread, and its descriptors belong to the parent.
  bool IsForked() const { return getpid() != pid_; }

  void Add(const std::shared_ptr<State>& state) {
    std::lock_guard lock(mutex_);
    if (!started_) {
      epoll_ = epoll_create1(EPOLL_CLOEXEC);
      wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
      if (epoll_ < 0 || wake_ < 0) Throw(ErrnoText("creating the watch of the peers"));
      epoll_event event{EPOLLIN, {}};
      epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);  // its number is 0
      std::thread([this] { Run(); }).detach();
      started_ = true;
    }
    const auto now = Clock::now();
    std::map<uint64_t, Connection> numbered;
    for (auto& [process, connection] : state->connections) {
      const uint64_t number = next_++;
      connection.record.heard = now;
      Register(connection.socket.get(), 2 * number);
      if (connection.pidfd.get() >= 0) Register(connection.pidfd.get(), 2 * number + 1);
      numbered.emplace(number, std::move(connection));
    }
    state->connections = std::move(numbered);
    states_.push_back(state);
    Wake();
  }

  // After it, no callback of `state` runs any more.
  void Remove(const std::shared_ptr<State>& state) {
    {
      std::lock_guard lock(mutex_);
      SendAll(*state, PeerNotice::kShutdown, "");
      for (auto& [number, connection] : state->connections) Unregister(connection);
      state->connections.clear();
      std::erase(states_, state);
    }
    std::lock_guard wait_for_callbacks(dispatch_);
  }

  void Finish(const std::shared_ptr<State>& state) {
    std::lock_guard lock(mutex_);
    SendAll(*state, PeerNotice::kFinished, "");
  }

  void Fail(const std::shared_ptr<State>& state, const std::string& text) {
    std::lock_guard lock(mutex_);
    SendAll(*state, PeerNotice::kFailed, text);
  }

  std::vector<Status> Peers(const std::shared_ptr<State>& state) {
    std::lock_guard lock(mutex_);
    std::vector<Status> all;
    for (const auto& [number, c] : state->connections) {
      all.push_back({c.process, c.pid, c.record.state, c.record.ended, c.what});
    }
    return all;
  }

  void Announce(const std::shared_ptr<State>& state) {
    std::lock_guard no_other_callback(dispatch_);
    Calls calls;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [number, connection] : state->connections) {
        if (connection.record.state != PeerState::kPresent) AddCall(*state, connection, &calls);
      }
    }
    for (const Call& call : calls) call();
  }

  uint64_t WaitForEvents(uint64_t seen, double timeout_s) {
    std::unique_lock lock(mutex_);
    happened_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                       [&] { return events_ != seen; });
    return events_;
  }

  void WakeWaiting() {
    std::lock_guard lock(mutex_);
    ++events_;
    happened_.notify_all();
  }

  void BeforeFork() { mutex_.lock(); }
  void AfterForkInParent() { mutex_.unlock(); }
  // The epoll instance is the parent's, too, so nothing may be removed from it.
  void AfterForkInChild() {
    for (const auto& state : states_) {
      for (auto& [number, connection] : state->connections) {
        connection.socket.Reset();
        connection.pidfd.Reset();
      }
    }
    if (epoll_ >= 0) close(epoll_);
    if (wake_ >= 0) close(wake_);
    epoll_ = wake_ = -1;
    mutex_.unlock();
  }

 private:
  struct Call {
    PeerSink sink;
    PeerState state;
    std::vector<int64_t> device_ids;
    std::string what;
    void operator()() const {
      sink.on_peer(state, device_ids.data(), device_ids.size(), what.c_str());
    }
  };
  using Calls = std::vector<Call>;

  // What a peer's record asks, and tells.
  struct Port {
    Thread& thread;
    const State& state;
    Connection& connection;
    Calls* calls;

    PeerNews Receive(std::optional<PeerMessage>* message) {
      if (connection.socket.get() < 0) return PeerNews::kEnd;
      char packet[2 + PeerMessage::kMaxText];
      const ssize_t size =
          recv(connection.socket.get(), packet, sizeof(packet), MSG_DONTWAIT | MSG_TRUNC);
      if (size > 0) {
        if (static_cast<size_t>(size) <= sizeof(packet)) {
          *message = ParseMessage({packet, static_cast<size_t>(size)});
        }
        return PeerNews::kPacket;
      }
      // ECONNRESET: the peer has closed its socket before it had read all. What it sent is still
      // there.
      if (size < 0 && (errno == EINTR || errno == ECONNRESET)) return PeerNews::kAgain;
      return size < 0 && errno == EAGAIN ? PeerNews::kNothing : PeerNews::kEnd;
    }
    bool IsExiting() const {
      return connection.pid_is_known && jax_intranode::IsExiting(connection.pid);
    }
    Clock::time_point Now() const { return Clock::now(); }
    bool HasPidfd() const { return connection.pidfd.get() >= 0; }
    void CloseSocket() { thread.Unregister(connection.socket); }
    void ClosePidfd() { thread.Unregister(connection.pidfd); }
    void Tell() {
      connection.what = WhatOf(connection, state.silent);
      AddCall(state, connection, calls);
    }
  };

  // How a peer has come into its state; empty if it is present.
  static std::string WhatOf(const Connection& connection, Clock::duration silent) {
    const std::string name = connection.Name();
    switch (connection.record.reason) {
      case PeerReason::kNone:
        break;
      case PeerReason::kNoGoodbye:
        return name + " has ended without a goodbye: it was killed, crashed, or called os._exit";
      case PeerReason::kFailed:
        return name + " has failed: " + connection.record.text;
      case PeerReason::kFinished:
        return name + " has come to the end of its program";
      case PeerReason::kShutdown:
        return name + " has called jax_intranode.shutdown()";
      case PeerReason::kSilent:
        const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(silent);
        return name + " has shown no sign of life for " + std::to_string(seconds.count()) +
               " s: it is stopped, or gets no processor time";
    }
    return "";
  }

  void Register(int fd, uint64_t number) {
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = number;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) Throw(ErrnoText("watching a peer"));
  }

  void Unregister(Fd& fd) {
    if (fd.get() >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd.get(), nullptr);
    fd.Reset();
  }

  void Unregister(Connection& connection) {
    Unregister(connection.socket);
    Unregister(connection.pidfd);
  }

  void Wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof(one));
  }

  static void Send(const Connection& connection, PeerNotice notice, const std::string& text) {
    const std::string packet = Packet(notice, text);
    send(connection.socket.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  static void SendAll(const State& state, PeerNotice notice, const std::string& text) {
    for (const auto& [number, connection] : state.connections) {
      if (connection.socket.get() >= 0) Send(connection, notice, text);
    }
  }

  static void AddCall(const State& state, const Connection& connection, Calls* calls) {
    calls->push_back({state.sink, connection.record.state, connection.device_ids, connection.what});
  }

  void Run() {
    auto next_tick = Clock::now();
    auto last_tick = next_tick;
    for (;;) {
      bool idle;
      {
        std::lock_guard lock(mutex_);
        idle = states_.empty();
      }
      epoll_event events[32];
      const int count =
          epoll_wait(epoll_, events, 32, idle ? -1 : Milliseconds(next_tick - Clock::now()));
      std::lock_guard dispatching(dispatch_);
      Calls calls;
      {
        std::lock_guard lock(mutex_);
        for (int i = 0; i < count; ++i) OnReady(events[i].data.u64, &calls);
        const auto now = Clock::now();
        if (now >= next_tick) {
          Tick(now, now - last_tick > kOwnGap, &calls);
          last_tick = now;
          next_tick = now + kTick;
        }
      }
      for (const Call& call : calls) call();
      // After the calls: who is woken finds the groups failed.
      if (!calls.empty()) WakeWaiting();
    }
  }

  void OnReady(uint64_t event, Calls* calls) {
    if (event == 0) {
      uint64_t value;
      [[maybe_unused]] const ssize_t size = read(wake_, &value, sizeof(value));
      return;
    }
    for (const auto& state : states_) {
      auto it = state->connections.find(event / 2);
      if (it == state->connections.end()) continue;
      Port port{*this, *state, it->second, calls};
      if (event % 2 == 1) {
        it->second.record.OnEnd(port);
      } else {
        it->second.record.OnSocket(port);
      }
    }
  }

  void Tick(Clock::time_point now, bool was_stopped, Calls* calls) {
    const bool beat = now - last_beat_ >= kHeartbeat;
    if (beat) last_beat_ = now;
    for (const auto& state : states_) {
      for (auto& [number, connection] : state->connections) {
        if (connection.record.ended) continue;
        if (beat) Send(connection, PeerNotice::kHeartbeat, "");
        Port port{*this, *state, connection, calls};
        connection.record.OnTick(port, now, state->silent, was_stopped);
      }
    }
  }

  const int pid_ = getpid();
  // Held while callbacks run. Taken before `mutex_`.
  std::mutex dispatch_;
  std::mutex mutex_;
  std::condition_variable happened_;
  std::vector<std::shared_ptr<State>> states_;
  uint64_t next_ = 1;
  uint64_t events_ = 0;
  Clock::time_point last_beat_{};
  bool started_ = false;
  int epoll_ = -1;
  int wake_ = -1;
};

PeerWatch::PeerWatch(int process) : process_(process), state_(std::make_shared<State>()) {
  Thread::Get();  // notes which process it is
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
  state_->listener = std::move(listener);
}

PeerWatch::~PeerWatch() { Close(); }

void PeerWatch::Connect(const std::vector<Peer>& peers, const std::string& secret,
                        double timeout_s) {
  if (secret.size() != sizeof(PeerHello::secret)) Throw("a secret of a wrong size");
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(timeout_s));
  std::map<int, Connection> made;
  const auto add = [&](const Peer& peer, const PeerHello& hello, int pid, Fd socket, Fd pidfd) {
    // Without a pidfd the socket has to do.
    if (pidfd.get() >= 0 && !IsPidfdOf(pidfd.get(), pid)) pidfd.Reset();
    Connection connection;
    connection.process = peer.process;
    connection.pid = pid > 0 ? pid : hello.pid;
    connection.pid_is_known = pid > 0;
    connection.device_ids = peer.device_ids;
    connection.socket = std::move(socket);
    connection.pidfd = std::move(pidfd);
    made.emplace(peer.process, std::move(connection));
  };
  const auto name = [](const Peer& peer) { return "process " + std::to_string(peer.process); };

  // Each process connects to those before it and is connected to by those after it. Nobody waits
  // before it has connected, so nobody waits in a circle.
  std::map<int, std::pair<Fd, int>> outgoing;  // the socket, and the peer's pid
  size_t incoming = 0;
  for (const Peer& peer : peers) {
    if (peer.process > process_) ++incoming;
    if (peer.process >= process_) continue;
    Fd out(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (out.get() < 0) Throw(ErrnoText("creating a Unix socket"));
    const timeval limit{static_cast<time_t>(timeout_s) + 1, 0};
    setsockopt(out.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    sockaddr_un address;
    const socklen_t size = Fill(&address, peer.address);
    if (connect(out.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
      Throw(ErrnoText("connecting to " + name(peer)));
    }
    int pid = 0;
    if (const std::string why = CheckUser(out.get(), &pid); !why.empty()) {
      Throw(name(peer) + " can't be watched: " + why);
    }
    SendHello(out.get(), process_, secret);
    outgoing.emplace(peer.process, std::make_pair(std::move(out), pid));
  }
  // All who have connected are heard at once, so that one who says nothing delays nobody.
  struct Caller {
    Fd socket;
    int pid;
    Clock::time_point until;
  };
  std::vector<Caller> callers;
  const auto answer = [&](Caller& caller) {
    Fd pidfd;
    const auto hello = ReceiveHello(caller.socket.get(), secret, Clock::now(), &pidfd);
    if (!hello || hello->process <= process_ || made.contains(hello->process)) return;
    for (const Peer& peer : peers) {
      if (peer.process != hello->process) continue;
      SendHello(caller.socket.get(), process_, secret);
      add(peer, *hello, caller.pid, std::move(caller.socket), std::move(pidfd));
      --incoming;
      return;
    }
  };
  while (incoming > 0) {
    std::vector<pollfd> polled{{state_->listener.get(), POLLIN, 0}};
    auto until = end;
    for (const Caller& caller : callers) {
      polled.push_back({caller.socket.get(), POLLIN, 0});
      until = std::min(until, caller.until);
    }
    const int ready = poll(polled.data(), polled.size(), Milliseconds(until - Clock::now()));
    if (ready < 0) {
      if (errno != EINTR) Throw(ErrnoText("waiting for the peers' connections"));
      continue;
    }
    const auto now = Clock::now();
    std::vector<Caller> silent;
    for (size_t i = 0; i < callers.size(); ++i) {
      if (polled[i + 1].revents != 0) {
        answer(callers[i]);
      } else if (now < callers[i].until) {
        silent.push_back(std::move(callers[i]));
      }
    }
    callers = std::move(silent);
    if (polled[0].revents != 0) {
      Fd in(accept4(state_->listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      int pid = 0;
      if (in.get() < 0) {
        // For instance because no descriptor is free. The connection stays ready: look again later.
        std::this_thread::sleep_for(10ms);
      } else if (CheckUser(in.get(), &pid).empty()) {
        callers.push_back({std::move(in), pid, now + kHelloPatience});
      }
    }
    for (const Peer& peer : peers) {
      if (now >= end && peer.process > process_ && !made.contains(peer.process)) {
        Throw(name(peer) + " did not connect in time");
      }
    }
  }
  for (const Peer& peer : peers) {
    auto it = outgoing.find(peer.process);
    if (it == outgoing.end()) continue;
    Fd pidfd;
    const auto hello = ReceiveHello(it->second.first.get(), secret, end, &pidfd);
    if (!hello || hello->process != peer.process) Throw(name(peer) + " did not answer in time");
    add(peer, *hello, it->second.second, std::move(it->second.first), std::move(pidfd));
  }
  state_->listener.Reset();
  for (auto& [process, connection] : made) {
    state_->connections.emplace(process, std::move(connection));
  }
}

void PeerWatch::Arm(PeerSink sink, double silent_s) {
  state_->sink = sink;
  state_->silent =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(silent_s));
  Thread::Get().Add(state_);
}

void PeerWatch::Announce() const {
  if (!Thread::Get().IsForked()) Thread::Get().Announce(state_);
}

void PeerWatch::Finish() {
  if (!Thread::Get().IsForked()) Thread::Get().Finish(state_);
}

void PeerWatch::Fail(const std::string& text) {
  if (!Thread::Get().IsForked()) Thread::Get().Fail(state_, text);
}

void PeerWatch::Close() {
  if (!Thread::Get().IsForked()) Thread::Get().Remove(state_);
}

std::vector<PeerWatch::Status> PeerWatch::Peers() const {
  if (Thread::Get().IsForked()) return {};
  return Thread::Get().Peers(state_);
}

uint64_t PeerWatch::WaitForEvents(uint64_t seen, double timeout_s) {
  return Thread::Get().WaitForEvents(seen, timeout_s);
}

void PeerWatch::WakeWaiting() { Thread::Get().WakeWaiting(); }

}  // namespace jax_intranode
