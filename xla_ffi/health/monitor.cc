#include "monitor.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "call_sites.h"

namespace jax_intranode {
namespace {

Clock::duration FromSeconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string SecondsText(Clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

}  // namespace

std::string PeerWatch::Peer::Name() const {
  return "process " + std::to_string(connection.process) + " (pid " +
         std::to_string(connection.pid) + ")";
}

// How it has come into its state; empty if it is present.
std::string PeerWatch::Peer::What(Clock::duration silent) const {
  switch (record.state) {
    case PeerState::kLost:
      return Name() + " has exited without notice: it was killed, crashed, or called os._exit";
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

bool PeerWatch::Peer::Has(int64_t device) const {
  const auto& ids = connection.device_ids;
  return std::find(ids.begin(), ids.end(), device) != ids.end();
}

// What a peer's record asks, and tells.
struct Monitor::Port {
  Monitor& monitor;
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
  bool HasEnded() const {
    return peer.connection.pid_is_known && jax_intranode::HasEnded(peer.connection.pid);
  }
  Clock::time_point Now() const { return Clock::now(); }
  void Close() { peer.connection.socket.Reset(); }
  void OnNote(const PeerMessage& message) {
    if (message.notice == PeerNotice::kBarrier) {
      peer.in_barrier = !message.text.empty();
      peer.may_end = !peer.in_barrier;
    }
    if (message.notice != PeerNotice::kWaits) return;
    const auto note = ParseNote(message.text);
    if (note && peer.Has(note->device)) monitor.reports_.Hear(*note, Clock::now());
  }
  void OnChange() { monitor.changed_ = true; }
};

// Never destroyed: the thread outlives static destruction.
Monitor& Monitor::Get() {
  static Monitor* const monitor = [] {
    auto* const made = new Monitor;
    pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); },
                   [] { Get().AfterForkInChild(); });
    return made;
  }();
  return *monitor;
}

void Monitor::AfterForkInChild() {
  is_forked_ = true;
  for (PeerWatch* watch : watches_) watch->peers_.clear();
  wake_.Reset();
  mutex_.unlock();
}

// Under `mutex_`. The first platform starts the thread.
void Monitor::Include(Platform* platform) {
  if (wake_.get() < 0) {
    wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (wake_.get() < 0) {
      throw std::runtime_error("creating the monitor: " + std::generic_category().message(errno));
    }
    std::thread([this] { Run(); }).detach();
  }
  if (std::find(platforms_.begin(), platforms_.end(), platform) == platforms_.end()) {
    platforms_.push_back(platform);
  }
  Wake();
}

void Monitor::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void Monitor::Add(Platform* platform, double patience_s) {
  std::lock_guard lock(mutex_);
  patience_ = FromSeconds(patience_s);
  Include(platform);
}

void Monitor::Run() {
  auto next_tick = Clock::now(), last_tick = next_tick;
  for (;;) {
    AwaitSockets(next_tick);
    std::lock_guard dispatching(dispatch_);
    const auto now = Clock::now();
    const bool ticks = now >= next_tick;
    const auto gap = now - std::exchange(last_tick, ticks ? now : last_tick);
    {
      std::lock_guard lock(mutex_);
      ReadAll();
      if (ticks) Tick(now, gap > kOwnGap);
    }
    if (std::exchange(changed_, false)) SetAbsent();
    if (ticks) {
      next_tick = now + kTick;
      Look(now, gap > kStopped ? gap : Clock::duration{});
    }
    Collect();
  }
}

// Sleeps until there is something to read, or something is new, or until `end`.
void Monitor::AwaitSockets(Clock::time_point end) {
  std::vector<pollfd> polled;
  {
    std::lock_guard lock(mutex_);
    polled.push_back({wake_.get(), POLLIN, 0});
    for (const PeerWatch* watch : watches_) {
      for (const Peer& peer : watch->peers_) {
        polled.push_back({peer.connection.socket.get(), POLLIN, 0});  // -1: poll() skips it
      }
    }
  }
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
  poll(polled.data(), polled.size(), std::max(0, static_cast<int>(wait.count())));
  uint64_t value;
  [[maybe_unused]] const ssize_t size = read(polled[0].fd, &value, sizeof(value));
}

void Monitor::ReadAll() {
  for (PeerWatch* watch : watches_) {
    for (Peer& peer : watch->peers_) {
      Port port{*this, peer};
      peer.record.OnSocket(port);
    }
  }
}

void Monitor::Tick(Clock::time_point now, bool was_stopped) {
  const bool beats = now - last_beat_ >= kHeartbeat;
  if (beats) last_beat_ = now;
  for (PeerWatch* watch : watches_) {
    if (beats) watch->SendAll(PeerNotice::kHeartbeat);
    for (Peer& peer : watch->peers_) {
      Port port{*this, peer};
      peer.record.OnTick(port, now, watch->silent_, was_stopped);
      if (peer.record.state > PeerState::kRunning) continue;
      const bool is_quiet = now - peer.record.heard > kQuiet;
      if (is_quiet == std::exchange(peer.is_quiet, is_quiet)) continue;
      Warn(peer.Name() + (is_quiet ? " has shown no sign of life for " + SecondsText(kQuiet) +
                                         ". Calls that wait for it fail after " +
                                         SecondsText(watch->silent_) + "."
                                   : " is heard again."));
    }
  }
}

// Tells the platforms who is absent, and of new faults.
void Monitor::SetAbsent() {
  std::map<Platform*, AbsentDevices> absent;
  std::vector<Failure> faults;
  {
    std::lock_guard lock(mutex_);
    for (Platform* platform : platforms_) absent[platform];
    for (PeerWatch* watch : watches_) {
      for (Peer& peer : watch->peers_) {
        const PeerState now = peer.record.state;
        const std::string what = peer.What(watch->silent_);
        for (const int64_t device : peer.connection.device_ids) {
          absent[watch->platform_].Add(device, {now, peer.record.since, what});
        }
        if (std::exchange(peer.told, now) == now) continue;
        if (now == PeerState::kSilent) Warn(what + ". Calls that wait for it fail.");
        if (AbsenceIn(now) != Absence::kFault || watch->fails_) continue;
        // No fault until a call needs it.
        if (now == PeerState::kLost && peer.may_end) continue;
        Failure& fault = faults.emplace_back(FailureReason::kPeerGone);
        fault.on_gpu = watch->platform_->OnGpu();
        fault.device_ids = peer.connection.device_ids;
        fault.process = peer.connection.process;
        fault.message = LostText(what, fault.on_gpu);
      }
    }
  }
  for (const auto& [platform, devices] : absent) platform->SetAbsent(devices);
  Collect();  // what groups have failed says more
  Tell(std::move(faults));
}

void Monitor::Look(Clock::time_point now, Clock::duration stopped) {
  bool waits_somewhere = false;
  for (Platform* platform : Platforms()) {
    const std::vector<Wait> waits = platform->Look(now, stopped);
    waits_somewhere |= !waits.empty();
    WaitReports::Outcome outcome;
    {
      std::lock_guard lock(mutex_);
      outcome = reports_.Update(waits, now, patience_);
      for (PeerWatch* watch : watches_) {
        if (watch->platform_ != platform) continue;
        for (const WaitNote& note : outcome.notes) {
          watch->SendAll(PeerNotice::kWaits, TextOf(note));
        }
      }
    }
    for (const std::string& warning : outcome.warnings) Warn(warning, true);
    for (const auto& [wait, reason] : outcome.over) wait.give_up(Failure(reason, wait));
  }
  std::lock_guard lock(mutex_);
  for (PeerWatch* watch : watches_) watch->FinishAgain(now, Calls(), waits_somewhere);
}

// Makes the text of what the platforms have failed with.
void Monitor::Collect() {
  for (Platform* platform : Platforms()) {
    std::vector<Failure> failures = platform->TakeFailures();
    for (Failure& failure : failures) {
      if (!failure.message.empty()) continue;  // a call that was refused, or of CPU devices
      AddDetail(&failure);
      failure.message = TextOf(failure);
      platform->LoseDevice(failure);  // its CUDA context is lost
    }
    Tell(std::move(failures));
  }
}

// What the missing rank of a kernel does instead, whose time was over.
void Monitor::AddDetail(Failure* failure) {
  if (failure->reason != FailureReason::kTimeout || failure->missing < 0) return;
  Wait wait{*failure, 1u << failure->rank};
  wait.site_number = Fnv1a(failure->site);
  std::lock_guard lock(mutex_);
  const auto mistake = reports_.Explain(&wait);
  static_cast<Call&>(*failure) = wait;
  if (mistake == WaitReports::Mistake::kMismatch) failure->reason = FailureReason::kMismatch;
}

// What else is to be said of the process that has a device.
std::string Monitor::DetailOf(int64_t device) const {
  for (const PeerWatch* watch : watches_) {
    for (const Peer& peer : watch->peers_) {
      if (!peer.Has(device)) continue;
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

uint64_t Monitor::Calls() const {
  uint64_t calls = 0;
  for (Platform* platform : platforms_) calls += platform->Calls();
  return calls;
}

std::vector<Platform*> Monitor::Platforms() {
  std::lock_guard lock(mutex_);
  return platforms_;
}

void Monitor::Warn(const std::string& text, bool is_wait) {
  std::lock_guard lock(news_mutex_);
  warnings_.push_back({is_wait, text});
  news_.notify_all();
}

void Monitor::Tell(std::vector<Failure> failures) {
  std::lock_guard lock(news_mutex_);
  for (Failure& failure : failures) failures_.push_back(std::move(failure));
  if (!failures_.empty()) news_.notify_all();
}

std::vector<Monitor::Warning> Monitor::TakeWarnings() {
  std::lock_guard lock(news_mutex_);
  return std::exchange(warnings_, {});
}

// Asks the platforms, too: the thread may not have looked since.
std::vector<Failure> Monitor::TakeFailures() {
  Collect();
  std::lock_guard lock(news_mutex_);
  return std::exchange(failures_, {});
}

void Monitor::AwaitNews(double timeout_s) {
  std::unique_lock lock(news_mutex_);
  news_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                 [&] { return news_ended_ || !warnings_.empty() || !failures_.empty(); });
}

void Monitor::EndNews() {
  std::lock_guard lock(news_mutex_);
  news_ended_ = true;
  news_.notify_all();
}

// The watches. What follows has no thread of its own.

PeerWatch::PeerWatch(int process) : socket_(process) {}
PeerWatch::~PeerWatch() { Close(); }

void PeerWatch::Connect(const std::vector<PeerAddress>& peers, const std::string& secret,
                        double timeout_s) {
  std::vector<Connection> connections = socket_.Connect(peers, secret, timeout_s);
  std::lock_guard lock(Monitor::Get().mutex_);
  for (Connection& connection : connections) peers_.push_back({std::move(connection)});
}

void PeerWatch::Arm(Platform* platform, double silent_s) {
  Monitor& monitor = Monitor::Get();
  std::lock_guard lock(monitor.mutex_);
  platform_ = platform;
  silent_ = FromSeconds(silent_s);
  for (Peer& peer : peers_) peer.record.since = peer.record.heard = Clock::now();
  monitor.watches_.push_back(this);
  monitor.Include(platform);
}

void PeerWatch::Finish() {
  Monitor& monitor = Monitor::Get();
  std::lock_guard lock(monitor.mutex_);
  finishes_ = finished_ = true;
  calls_ = monitor.Calls();
  SendAll(PeerNotice::kFinished);
}

void PeerWatch::GoOn() {
  std::lock_guard lock(Monitor::Get().mutex_);
  finishes_ = finished_ = false;
  SendAll(PeerNotice::kGoesOn);
}

void PeerWatch::Fail(const std::string& text) {
  std::lock_guard lock(Monitor::Get().mutex_);
  fails_ = true;
  SendAll(PeerNotice::kFailed, text);
}

void PeerWatch::SetInBarrier(bool is_in_barrier) {
  std::lock_guard lock(Monitor::Get().mutex_);
  SendAll(PeerNotice::kBarrier, is_in_barrier ? "1" : "");
}

// After it, no platform is told of its peers any more.
void PeerWatch::Close() {
  Monitor& monitor = Monitor::Get();
  if (monitor.is_forked_) return;
  std::lock_guard no_other_call(monitor.dispatch_);
  {
    std::lock_guard lock(monitor.mutex_);
    SendAll(PeerNotice::kShutdown);
    peers_.clear();
    if (std::erase(monitor.watches_, this) == 0) return;
    monitor.Wake();  // while it sleeps on a socket, that is open
  }
  monitor.SetAbsent();
}

std::vector<PeerWatch::Status> PeerWatch::Peers() const {
  std::lock_guard lock(Monitor::Get().mutex_);
  std::vector<Status> all;
  for (const Peer& peer : peers_) {
    all.push_back({peer.connection.process, peer.connection.pid, peer.record.state,
                   peer.record.HasEnded(), peer.What(silent_), peer.in_barrier});
  }
  return all;
}

void PeerWatch::SendAll(PeerNotice notice, const std::string& text) {
  const std::string packet = Packet(notice, text);
  for (const Peer& peer : peers_) {
    const int socket = peer.connection.socket.get();
    if (socket >= 0) send(socket, packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

// A process that has finished and calls all the same takes it back, and finishes later.
void PeerWatch::FinishAgain(Clock::time_point now, uint64_t calls, bool waits) {
  if (!finishes_) return;
  const bool has_called = std::exchange(calls_, calls) != calls;
  if (has_called || waits) called_at_ = now;
  if (finished_ ? has_called : now - called_at_ >= kFinishesAgain) {
    finished_ = !finished_;
    SendAll(finished_ ? PeerNotice::kFinished : PeerNotice::kGoesOn);
  }
}

}  // namespace jax_intranode
