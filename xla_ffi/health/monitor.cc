#include "monitor.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "../ffi/site_numbers.h"
#include "peer_record.h"
#include "waits.h"

namespace jax_intranode {
namespace {

using namespace std::chrono_literals;

constexpr auto kTick = 250ms;
constexpr auto kHeartbeat = 1s;
// After such a gap between two ticks this process was stopped itself: waits don't count it.
constexpr auto kStopped = 1s;
// After such a gap it can't judge others.
constexpr auto kOwnGap = 5s;
// When a silence is reported.
constexpr auto kQuiet = 10s;
// When a process that has taken back that it has finished tells it again.
constexpr auto kFinishesAgain = 5s;

Clock::duration FromSeconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string SecondsText(Clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

void Write(int eventfd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(eventfd, &one, sizeof(one));
}

}  // namespace

struct PeerWatch::Peer {
  Connection connection;
  PeerRecord record{};
  bool is_quiet = false;  // a silence has been reported
  bool in_barrier = false;

  std::string Name() const {
    return "process " + std::to_string(connection.process) + " (pid " +
           std::to_string(connection.pid) + ")";
  }
  // How it has come into its state; empty if it is present.
  std::string What(Clock::duration silent) const {
    switch (record.state) {
      case PeerState::kLost:
        return Name() + " has ended without a goodbye: it was killed, crashed, or called os._exit";
      case PeerState::kFailed:
        return Name() + " has failed: " + record.text;
      case PeerState::kFinished:
        return Name() + " has come to the end of its program";
      case PeerState::kLeft:
        return Name() + " has called jax_intranode.shutdown()";
      case PeerState::kSilent:
        return Name() + " has shown no sign of life for " + SecondsText(silent) +
               ": it is stopped, or gets no processor time";
      default:
        return "";
    }
  }
};

// The part of a watch that the monitor's thread uses. The lock of the thread guards it.
struct PeerWatch::State {
  std::map<uint64_t, Peer> peers;
  Platform* platform = nullptr;
  Clock::duration silent{};
  bool finishes = false;  // Finish() was called
  bool finished = false;  // and the peers have been told
  uint64_t calls = 0;     // of handlers when this was looked at last
  Clock::time_point called_at{};
};

class Monitor::Thread {
 public:
  using Peer = PeerWatch::Peer;
  using State = PeerWatch::State;

  // Never destroyed: the thread outlives static destruction.
  static Thread& Get() {
    static Thread* const thread = [] {
      auto* const made = new Thread;
      pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); },
                     [] { Get().AfterForkInChild(); });
      return made;
    }();
    return *thread;
  }

  // A forked child has no thread, and its descriptors belong to the parent.
  bool IsForked() const { return getpid() != pid_; }

  void Add(Platform* platform, double patience_s) {
    std::lock_guard lock(mutex_);
    Start();
    patience_ = FromSeconds(patience_s);
    if (std::find(platforms_.begin(), platforms_.end(), platform) != platforms_.end()) return;
    platforms_.push_back(platform);
    Write(wake_);
  }

  void Adopt(State& state, std::vector<Connection> connections) {
    std::lock_guard lock(mutex_);
    for (Connection& connection : connections) {
      state.peers.emplace(next_++, Peer{std::move(connection)});
    }
  }

  void Add(const std::shared_ptr<State>& state) {
    std::lock_guard lock(mutex_);
    Start();
    for (auto& [number, peer] : state->peers) {
      peer.record.since = peer.record.heard = Clock::now();
      Register(peer.connection.socket.get(), 2 * number);
      const int pidfd = peer.connection.pidfd.get();
      if (pidfd >= 0) Register(pidfd, 2 * number + 1);
    }
    states_.push_back(state);
    if (std::find(platforms_.begin(), platforms_.end(), state->platform) == platforms_.end()) {
      platforms_.push_back(state->platform);
    }
    Write(wake_);
  }

  // After it, no platform is told of its peers any more.
  void Remove(const std::shared_ptr<State>& state) {
    std::lock_guard no_other_call(dispatch_);
    {
      std::lock_guard lock(mutex_);
      SendAll(*state, PeerNotice::kShutdown);
      for (auto& [number, peer] : state->peers) {
        Unregister(peer.connection.socket);
        Unregister(peer.connection.pidfd);
        told_.erase(number);
      }
      state->peers.clear();
      std::erase(states_, state);
    }
    if (state->platform != nullptr) SetAbsent();
  }

  void Finish(State& state) {
    std::lock_guard lock(mutex_);
    state.finishes = state.finished = true;
    state.calls = Calls();
    SendAll(state, PeerNotice::kFinished);
  }

  void Tell(const State& state, PeerNotice notice, const std::string& text) {
    std::lock_guard lock(mutex_);
    SendAll(state, notice, text);
  }

  std::vector<PeerWatch::Status> Peers(const State& state) {
    std::lock_guard lock(mutex_);
    std::vector<PeerWatch::Status> all;
    for (const auto& [number, peer] : state.peers) {
      all.push_back({peer.connection.process, peer.connection.pid, peer.record.state,
                     peer.record.ended, peer.What(state.silent)});
    }
    return all;
  }

  std::vector<Warning> TakeWarnings() {
    std::lock_guard lock(news_mutex_);
    return std::exchange(warnings_, {});
  }

  // Asks the platforms, too: the thread may not have looked since.
  std::vector<Failure> TakeFailures() {
    Collect();
    std::lock_guard lock(news_mutex_);
    return std::exchange(failures_, {});
  }

  void AwaitNews(double timeout_s) {
    std::unique_lock lock(news_mutex_);
    news_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                   [&] { return news_ended_ || !warnings_.empty() || !failures_.empty(); });
  }

  void EndNews() {
    std::lock_guard lock(news_mutex_);
    news_ended_ = true;
    news_.notify_all();
  }

 private:
  // What a peer's record asks, and tells.
  struct Port {
    Thread& thread;
    const State& state;
    Peer& peer;

    PeerNews Receive(std::optional<PeerMessage>* message) {
      const int socket = peer.connection.socket.get();
      if (socket < 0) return PeerNews::kEnd;
      char packet[2 + PeerMessage::kMaxText];
      const ssize_t size = recv(socket, packet, sizeof(packet), MSG_DONTWAIT | MSG_TRUNC);
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
      return peer.connection.pid_is_known && jax_intranode::IsExiting(peer.connection.pid);
    }
    Clock::time_point Now() const { return Clock::now(); }
    bool HasPidfd() const { return peer.connection.pidfd.get() >= 0; }
    void CloseSocket() { thread.Unregister(peer.connection.socket); }
    void ClosePidfd() { thread.Unregister(peer.connection.pidfd); }
    void OnNote(const PeerMessage& message) {
      if (message.notice == PeerNotice::kBarrier) peer.in_barrier = !message.text.empty();
      if (message.notice != PeerNotice::kWaits) return;
      const auto note = ParseNote(message.text);
      const auto& ids = peer.connection.device_ids;
      if (note && std::find(ids.begin(), ids.end(), note->device) != ids.end()) {
        thread.reports_.Hear(*note, Clock::now());
      }
    }
    void OnChange() { thread.changed_ = true; }
  };

  void Start() {
    if (epoll_ >= 0) return;
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || wake_ < 0) {
      throw std::runtime_error("creating the monitor: " + std::generic_category().message(errno));
    }
    Register(wake_, 0);
    std::thread([this] { Run(); }).detach();
  }

  // The epoll instance is the parent's, too, so nothing may be removed from it.
  void AfterForkInChild() {
    for (const auto& state : states_) {
      for (auto& [number, peer] : state->peers) {
        peer.connection.socket.Reset();
        peer.connection.pidfd.Reset();
      }
    }
    for (int* fd : {&epoll_, &wake_}) {
      if (*fd >= 0) close(std::exchange(*fd, -1));
    }
    mutex_.unlock();
  }

  void Register(int fd, uint64_t number) {
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = number;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
      throw std::runtime_error("watching a peer: " + std::generic_category().message(errno));
    }
  }

  void Unregister(Fd& fd) {
    if (fd.get() >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd.get(), nullptr);
    fd.Reset();
  }

  static void SendAll(const State& state, PeerNotice notice, const std::string& text = "") {
    const std::string packet = Packet(notice, text);
    for (const auto& [number, peer] : state.peers) {
      const int socket = peer.connection.socket.get();
      if (socket >= 0) send(socket, packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }

  uint64_t Calls() const {
    uint64_t calls = 0;
    for (Platform* platform : platforms_) calls += platform->Calls();
    return calls;
  }

  void Run() {
    auto next_tick = Clock::now(), last_tick = next_tick;
    for (;;) {
      epoll_event events[32];
      const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next_tick - Clock::now());
      const int count = epoll_wait(epoll_, events, 32, std::max(0, static_cast<int>(wait.count())));
      std::lock_guard dispatching(dispatch_);
      const auto now = Clock::now();
      const bool ticks = now >= next_tick;
      const auto gap = std::exchange(last_tick, ticks ? now : last_tick);
      {
        std::lock_guard lock(mutex_);
        for (int i = 0; i < count; ++i) OnReady(events[i].data.u64);
        if (ticks) Tick(now, now - gap > kOwnGap);
      }
      if (std::exchange(changed_, false)) SetAbsent();
      if (ticks) {
        next_tick = now + kTick;
        Look(now, now - gap > kStopped ? now - gap : Clock::duration{});
      }
      Collect();
    }
  }

  void OnReady(uint64_t event) {
    if (event == 0) {
      uint64_t value;
      [[maybe_unused]] const ssize_t size = read(wake_, &value, sizeof(value));
      return;
    }
    for (const auto& state : states_) {
      const auto found = state->peers.find(event / 2);
      if (found == state->peers.end()) continue;
      Port port{*this, *state, found->second};
      if (event % 2 == 1) {
        found->second.record.OnEnd(port);
      } else {
        found->second.record.OnSocket(port);
      }
    }
  }

  void Tick(Clock::time_point now, bool was_stopped) {
    const bool beats = now - last_beat_ >= kHeartbeat;
    if (beats) last_beat_ = now;
    for (const auto& state : states_) {
      if (beats) SendAll(*state, PeerNotice::kHeartbeat);
      for (auto& [number, peer] : state->peers) {
        Port port{*this, *state, peer};
        peer.record.OnTick(port, now, state->silent, was_stopped);
        const bool runs = peer.record.state <= PeerState::kRunning;
        const bool is_quiet = runs && now - peer.record.heard > kQuiet;
        if (is_quiet && !peer.is_quiet) {
          Warn(peer.Name() + " has shown no sign of life for " + SecondsText(kQuiet) +
               ". Calls that wait for it fail after " + SecondsText(state->silent) + ".");
        } else if (runs && peer.is_quiet && !is_quiet) {
          Warn(peer.Name() + " is heard again.");
        }
        if (runs) peer.is_quiet = is_quiet;
      }
    }
  }

  // Tells the platforms who is absent, and of new faults.
  void SetAbsent() {
    std::map<Platform*, AbsentDevices> absent;
    std::vector<Failure> faults;
    {
      std::lock_guard lock(mutex_);
      for (const auto& state : states_) {
        for (auto& [number, peer] : state->peers) {
          const PeerState now = peer.record.state;
          const Absence absence = AbsenceIn(now);
          const std::string what = peer.What(state->silent);
          for (const int64_t device : peer.connection.device_ids) {
            absent[state->platform].Add(device, {absence, now, peer.record.since, what});
          }
          const bool is_new = std::exchange(told_[number], now) != now;
          if (is_new && now == PeerState::kSilent) Warn(what + ". Calls that wait for it fail.");
          if (!is_new || absence != Absence::kFault) continue;
          const bool on_gpu = state->platform->OnGpu();
          Failure fault{FailureReason::kPeerGone, on_gpu};
          fault.device_ids = peer.connection.device_ids;
          fault.process = peer.connection.process;
          fault.message = LostText(what, on_gpu);
          faults.push_back(std::move(fault));
        }
      }
    }
    for (Platform* platform : Platforms()) platform->SetAbsent(absent[platform]);
    Collect();  // what groups have failed says more
    std::lock_guard lock(news_mutex_);
    for (Failure& fault : faults) failures_.push_back(std::move(fault));
    if (!faults.empty()) news_.notify_all();
  }

  void Look(Clock::time_point now, Clock::duration stopped) {
    bool waits_somewhere = false;
    for (Platform* platform : Platforms()) {
      const auto has_called = [platform](const Wait& wait, uint64_t site, uint64_t count) {
        return platform->HasCalled(wait, site, count);
      };
      const std::vector<Wait> waits = platform->Look(now, stopped);
      waits_somewhere |= !waits.empty();
      WaitReports::Outcome outcome;
      {
        std::lock_guard lock(mutex_);
        outcome = reports_.Update(waits, now, patience_, has_called,
                                  [this](int64_t device) { return DetailOf(device); });
        for (const auto& state : states_) {
          if (state->platform != platform) continue;
          for (const WaitNote& note : outcome.notes) {
            SendAll(*state, PeerNotice::kWaits, TextOf(note));
          }
        }
      }
      for (const std::string& warning : outcome.warnings) Warn(warning, true);
      for (auto& [wait, failure] : outcome.over) platform->GiveUp(wait, std::move(failure));
    }
    std::lock_guard lock(mutex_);
    for (const auto& state : states_) {
      if (state->finishes) FinishAgain(*state, now, waits_somewhere);
    }
  }

  // A process that has finished and calls all the same takes it back, and finishes later.
  void FinishAgain(State& state, Clock::time_point now, bool waits) {
    const uint64_t calls = Calls();
    const bool has_called = std::exchange(state.calls, calls) != calls;
    if (has_called || waits) state.called_at = now;
    if (state.finished ? has_called : now - state.called_at >= kFinishesAgain) {
      state.finished = !state.finished;
      SendAll(state, state.finished ? PeerNotice::kFinished : PeerNotice::kGoesOn);
    }
  }

  std::vector<Platform*> Platforms() {
    std::lock_guard lock(mutex_);
    return platforms_;
  }

  // What else is to be said of the process that has a device.
  std::string DetailOf(int64_t device) const {
    for (const auto& state : states_) {
      for (const auto& [number, peer] : state->peers) {
        const auto& ids = peer.connection.device_ids;
        if (std::find(ids.begin(), ids.end(), device) == ids.end()) continue;
        if (peer.in_barrier) {
          return ", whose process waits for all others in jax.distributed.shutdown()";
        }
        if (peer.is_quiet) {
          return ", whose process has shown no sign of life for " +
                 SecondsText(Clock::now() - peer.record.heard);
        }
      }
    }
    return "";
  }

  void Collect() {
    for (Platform* platform : Platforms()) {
      for (Failure& failure : platform->TakeFailures()) {
        if (failure.message.empty()) {
          AddDetail(*platform, &failure);
          failure.message = TextOf(failure);
        }
        // The CUDA context is lost, and with it all communicators.
        if (failure.on_gpu) platform->FailAll(failure.message);
        std::lock_guard lock(news_mutex_);
        failures_.push_back(std::move(failure));
        news_.notify_all();
      }
    }
  }

  // What the missing rank of a kernel does instead, whose time was over.
  void AddDetail(Platform& platform, Failure* failure) {
    if (failure->reason != FailureReason::kTimeout || failure->missing < 0) return;
    Wait wait;
    wait.device_ids = failure->device_ids;
    wait.group = failure->group;
    wait.rank = failure->rank;
    wait.missing = failure->missing;
    wait.present = 1u << failure->rank;
    wait.site_number = Fnv1a(failure->site);
    std::lock_guard lock(mutex_);
    const auto why = reports_.Explain(
        wait,
        [&](const Wait& w, uint64_t site, uint64_t count) {
          return platform.HasCalled(w, site, count);
        },
        [this](int64_t device) { return DetailOf(device); });
    failure->missing = why.missing;
    failure->detail = why.detail;
    if (why.mismatch) failure->reason = FailureReason::kMismatch;
  }

  void Warn(const std::string& text, bool is_wait = false) {
    std::lock_guard lock(news_mutex_);
    warnings_.push_back({is_wait, text});
    news_.notify_all();
  }

  const int pid_ = getpid();
  // Held while platforms are told. Taken before `mutex_`.
  std::mutex dispatch_;
  std::mutex mutex_;
  std::vector<Platform*> platforms_;
  std::vector<std::shared_ptr<State>> states_;
  std::map<uint64_t, PeerState> told_;  // the states that platforms know, by peer
  WaitReports reports_;
  uint64_t next_ = 1;
  Clock::time_point last_beat_{};
  Clock::duration patience_ = 10s;
  bool changed_ = false;
  int epoll_ = -1;
  int wake_ = -1;
  // Taken last.
  std::mutex news_mutex_;
  std::condition_variable news_;
  std::vector<Warning> warnings_;
  std::vector<Failure> failures_;
  bool news_ended_ = false;
};

Monitor& Monitor::Get() {
  static Monitor monitor;
  return monitor;
}
void Monitor::Add(Platform* platform, double patience_s) {
  Thread::Get().Add(platform, patience_s);
}
std::vector<Monitor::Warning> Monitor::TakeWarnings() { return Thread::Get().TakeWarnings(); }
std::vector<Failure> Monitor::TakeFailures() { return Thread::Get().TakeFailures(); }
void Monitor::AwaitNews(double timeout_s) { Thread::Get().AwaitNews(timeout_s); }
void Monitor::EndNews() { Thread::Get().EndNews(); }

PeerWatch::PeerWatch(int process) : socket_(process), state_(std::make_shared<State>()) {
  Monitor::Thread::Get();  // notes which process it is
}
PeerWatch::~PeerWatch() { Close(); }

void PeerWatch::Connect(const std::vector<PeerAddress>& peers, const std::string& secret,
                        double timeout_s) {
  Monitor::Thread::Get().Adopt(*state_, socket_.Connect(peers, secret, timeout_s));
}
void PeerWatch::Arm(Platform* platform, double silent_s) {
  state_->platform = platform;
  state_->silent = FromSeconds(silent_s);
  Monitor::Thread::Get().Add(state_);
}
void PeerWatch::Finish() {
  if (!Monitor::Thread::Get().IsForked()) Monitor::Thread::Get().Finish(*state_);
}
void PeerWatch::Fail(const std::string& text) {
  if (!Monitor::Thread::Get().IsForked()) {
    Monitor::Thread::Get().Tell(*state_, PeerNotice::kFailed, text);
  }
}
void PeerWatch::SetInBarrier(bool is_in_barrier) {
  if (!Monitor::Thread::Get().IsForked()) {
    Monitor::Thread::Get().Tell(*state_, PeerNotice::kBarrier, is_in_barrier ? "1" : "");
  }
}
void PeerWatch::Close() {
  if (!Monitor::Thread::Get().IsForked()) Monitor::Thread::Get().Remove(state_);
}
std::vector<PeerWatch::Status> PeerWatch::Peers() const {
  if (Monitor::Thread::Get().IsForked()) return {};
  return Monitor::Thread::Get().Peers(*state_);
}

}  // namespace jax_intranode
