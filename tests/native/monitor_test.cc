// Runs the monitor's watch of the peers (health/monitor.h) in real processes.
//
//   monitor_test [quick]
//
// Each case has three processes that connect and watch each other. One of them, the victim, ends in
// some way, or stops. Checked is what the others are told: which states, in which order, why, and
// each once. All cases run at the same time; "quick" leaves out the one in which a process is
// stopped, which takes 8 s. Meant for ThreadSanitizer, AddressSanitizer and UBSan, too.
#include "xla_ffi/health/monitor.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace jin = jax_intranode;
using jin::PeerState;
using namespace std::chrono_literals;

namespace {

constexpr int kProcesses = 3;
constexpr int kVictim = 1;
// The watch promises 1 s. A machine under load may be slow: this only tells a hang.
constexpr auto kPatience = 20s;
constexpr unsigned kLimitS = 60;  // a process that is still there is killed
constexpr double kSilenceS = 3;   // three heartbeats
constexpr double kLongSilenceS = 100;
const std::string kSecret(32, 'k');

// What the platform is told of the victim.
struct News {
  PeerState state;
  const char* text;
};
constexpr News kKilled{PeerState::kLost, " has exited without notice"},
    kShutdown{PeerState::kLeft, " has called jax_intranode.shutdown()"},
    kFinished{PeerState::kFinished, " has come to the end of its program"},
    kFailed{PeerState::kFailed, " has failed: KeyError: 'x'"},
    kSilent{PeerState::kSilent, " has shown no sign of life for 3 s"},
    kBack{PeerState::kRunning, nullptr};

const char* case_name = "";
int rank = -1;

[[noreturn]] void Wrong(const std::string& what) {
  // In one piece, because several processes write.
  const std::string line =
      std::string(case_name) + ": process " + std::to_string(rank) + ": " + what + "\n";
  [[maybe_unused]] const ssize_t written = write(STDOUT_FILENO, line.data(), line.size());
  _exit(1);
}

void Check(bool holds, const std::string& what) {
  if (!holds) Wrong(what);
}

template <class Condition>
void Await(Condition condition, const char* what) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    Check(std::chrono::steady_clock::now() < end, std::string("waited in vain for ") + what);
    std::this_thread::sleep_for(1ms);
  }
}

enum Who { kAll, kObservers };

// Shared by the processes of a case, as JAX's key-value store is.
struct Board {
  char address[kProcesses][108];
  std::atomic<int> pid[kProcesses];
  std::atomic<int> arrived[2];  // at meetings of all, and of the observers
  std::atomic<bool> child_said;
};
Board* board;

// All processes of the case, or its observers, wait for each other.
void Meet(Who who) {
  static int times[2] = {};
  const int all = ++times[who] * (who == kAll ? kProcesses : kProcesses - 1);
  ++board->arrived[who];
  Await([=] { return board->arrived[who] >= all; }, "the other processes");
}
bool ObserversHaveMet() { return board->arrived[kObservers] >= kProcesses - 1; }

// What the platform was told of each process that changed. The device of a process has the id 10 x
// its number.
struct Event {
  int process;
  PeerState state;
  std::string what;
};
std::mutex events_mutex;
std::vector<Event> events;
std::atomic<bool> closed = false;
std::atomic<bool> slow = false;     // whether the next SetAbsent() takes long
std::atomic<bool> in_call = false;  // that one runs

class TestPlatform final : public jin::Platform {
 public:
  bool OnGpu() const override { return false; }
  void SetAbsent(const jin::AbsentDevices& absent) override {
    if (slow.exchange(false)) {
      in_call = true;
      std::this_thread::sleep_for(300ms);
      in_call = false;
    }
    std::lock_guard lock(events_mutex);
    for (int process = 0; process < kProcesses; ++process) {
      const jin::AbsentDevice* const device = absent.Find(10 * process);
      const PeerState state = device ? device->state : PeerState::kRunning;
      Check(!closed || device == nullptr, "told of an absence after Close()");
      if (closed || known_[process] == state) continue;
      known_[process] = state;
      events.push_back({process, state, device ? device->what : ""});
    }
  }
  std::vector<jin::Wait> Look(jin::Clock::time_point, jin::Clock::duration) override { return {}; }
  std::vector<jin::Failure> TakeFailures() override { return {}; }
  uint64_t Calls() override { return 0; }

 private:
  std::array<PeerState, kProcesses> known_ = {PeerState::kRunning, PeerState::kRunning,
                                              PeerState::kRunning};
};
TestPlatform platform;
// It lives until the process ends, as that of a Python program.
std::unique_ptr<jin::PeerWatch> watch;

// Makes a watch that is connected with all others.
void Connect() {
  watch = std::make_unique<jin::PeerWatch>(rank);
  snprintf(board->address[rank], sizeof board->address[rank], "%s", watch->address().c_str());
  board->pid[rank] = getpid();
  Meet(kAll);
  std::vector<jin::PeerAddress> peers;
  for (int process = 0; process < kProcesses; ++process) {
    if (process != rank) peers.push_back({process, board->address[process], {10 * process}});
  }
  watch->Connect(peers, kSecret, 20);
  Meet(kAll);
}

void Arm(double silent_s = kLongSilenceS) { watch->Arm(&platform, silent_s); }

void Close() {
  watch->Close();
  closed = true;
}

jin::PeerWatch::Status StatusOfVictim() {
  for (const auto& status : watch->Peers()) {
    if (status.process == kVictim) return status;
  }
  Wrong("no status of the victim");
}

// So much has been told.
void AwaitNews(size_t count) {
  Await(
      [=] {
        std::lock_guard lock(events_mutex);
        return events.size() >= count;
      },
      ("news " + std::to_string(count)).c_str());
}

// The victim ends, and this has been told, and nothing else. A fault is reported once.
void ExpectTheEnd(const std::vector<News>& expected) {
  AwaitNews(expected.size());
  const News& last = expected.back();
  // Whoever has left may live on: its end is not looked at.
  Await([&] { return StatusOfVictim().ended != (last.state == PeerState::kLeft); }, "the end");
  std::this_thread::sleep_for(600ms);  // two ticks
  const std::string name =
      "process " + std::to_string(kVictim) + " (pid " + std::to_string(board->pid[kVictim]) + ")";
  for (size_t k = 0; k < events.size(); ++k) {
    std::lock_guard lock(events_mutex);
    const auto& [process, state, what] = events[k];
    const bool right = k < expected.size() && process == kVictim && state == expected[k].state &&
                       (expected[k].text ? what.starts_with(name + expected[k].text) : what == "");
    Check(right, "told of state " + std::to_string(static_cast<int>(state)) + " of process " +
                     std::to_string(process) + " [" + what + "]");
  }
  const auto failures = jin::Monitor::Get().TakeFailures();
  const bool fault = jin::AbsenceIn(last.state) == jin::Absence::kFault;
  Check(failures.size() == (fault ? 1 : 0), std::to_string(failures.size()) + " failures");
  Check(!fault || (failures[0].process == kVictim &&
                   failures[0].message.find(last.text) != std::string::npos),
        "another failure");
  const auto status = StatusOfVictim();
  Check(status.state == last.state && status.pid == board->pid[kVictim],
        "another status than the platform was told");
  Meet(kObservers);  // before one of them says goodbye
}

[[noreturn]] void KillMyself() {
  raise(SIGKILL);
  abort();
}

// The victim ends in some way, of which the others are told; if `early`, before they are armed.
void Ending(const News& news, bool early, const std::function<void()>& end) {
  Connect();
  if (early && rank == kVictim) return end();
  if (early && rank == 0) std::this_thread::sleep_for(300ms);
  Arm();
  if (rank != kVictim) return ExpectTheEnd({news});
  std::this_thread::sleep_for(50ms);
  end();
}

// Close() waits until the platform is not told any more.
void CloseInCall() {
  Connect();
  slow = rank != kVictim;
  Arm();
  if (rank == kVictim) KillMyself();
  Await([] { return in_call.load(); }, "the call");
  Close();
  Check(!in_call, "Close() returned too early");
}

// SIGSTOP and SIGCONT, and an end while it is stopped.
void Stopped() {
  Connect();
  Arm(kSilenceS);
  Meet(kAll);
  if (rank == kVictim) {
    // A process that was stopped itself does not judge others.
    while (!ObserversHaveMet()) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(600ms);
    {
      std::lock_guard lock(events_mutex);
      Check(events.empty(), "a process that was stopped judges others");
    }
    Meet(kAll);
    for (;;) pause();
  }
  const auto send = [](int signal) {
    Meet(kObservers);
    if (rank == 0) kill(board->pid[kVictim], signal);
  };
  if (rank == 0) kill(board->pid[kVictim], SIGSTOP);
  AwaitNews(1);
  Check(!StatusOfVictim().ended, "a process that is stopped has not ended");
  send(SIGCONT);
  AwaitNews(2);
  Meet(kAll);
  send(SIGSTOP);
  AwaitNews(3);
  send(SIGKILL);
  ExpectTheEnd({kSilent, kBack, kSilent, kKilled});
}

// A child outlives the victim. One that was made without the C library's fork() keeps copies of the
// victim's sockets: /proc tells of the victim's end. What the other one says is not told to the
// peers of its parent.
void ForkAndDie(bool by_fork) {
  const pid_t child = by_fork ? fork() : static_cast<pid_t>(syscall(SYS_fork));
  Check(child >= 0, "fork");
  if (child == 0) {
    alarm(kLimitS);
    if (by_fork) {
      Check(watch->Peers().empty(), "the watch belongs to the parent");
      watch->Finish();
      watch->Fail("the child");
      watch->Close();
    }
    board->child_said = true;
    while (!ObserversHaveMet()) std::this_thread::sleep_for(10ms);
    _exit(0);
  }
  Await([] { return board->child_said.load(); }, "the child");
  Check(watch->Peers().size() == kProcesses - 1, "the parent goes on watching");
  KillMyself();
}

// New watches again and again. All say goodbye at the same time, and none is lost.
void Again() {
  for (int round = 0; round < 20; ++round) {
    closed = false;
    Connect();
    Arm();
    if (round % 2 == 0) Meet(kAll);
    if ((round + rank) % 3 == 0) watch->Finish();
    Close();
    for (const Event& event : events) {
      Check(jin::AbsenceIn(event.state) != jin::Absence::kFault,
            "told of a fault [" + event.what + "]");
    }
    events.clear();
    Meet(kAll);
  }
}

// Several threads use the watch while a peer is killed.
void Threads() {
  Connect();
  Arm();
  std::atomic<bool> ends = false;
  std::thread asks([&] {
    while (!ends) {
      for (const auto& status : watch->Peers()) Check(status.pid > 0, "a status without a pid");
      std::this_thread::sleep_for(1ms);
    }
  });
  std::thread takes([&] {
    while (!ends) {
      jin::Monitor::Get().AwaitNews(100);
      jin::Monitor::Get().TakeFailures();
      jin::Monitor::Get().TakeWarnings();
    }
  });
  Meet(kAll);
  if (rank == kVictim) KillMyself();
  Await([] { return StatusOfVictim().state == PeerState::kLost; }, "the end");
  if (rank == 0) watch->Finish();
  ends = true;
  jin::Monitor::Get().EndNews();
  asks.join();
  takes.join();
  Meet(kObservers);
  Close();
}

struct Case {
  const char* name;
  std::function<void()> run;  // in each process
  int victim_status;          // as waitpid() returns it
};

std::vector<Case> Cases() {
  const auto ends = [](const News& news, auto... steps) {
    return [=] { Ending(news, false, [=] { (steps(), ...); }); };
  };
  const auto ends_early = [](const News& news, auto... steps) {
    return [=] { Ending(news, true, [=] { (steps(), ...); }); };
  };
  const auto fail = [] { watch->Fail("KeyError: 'x'"); };
  const auto finish = [] { watch->Finish(); };
  const auto exits = [] { _exit(0); };
  const auto returns = [] { exit(0); };
  return {
      {"killed", ends(kKilled, KillMyself), SIGKILL},
      {"exit", ends(kKilled, exits), 0},
      {"close", ends(kShutdown, Close, exits), 0},
      {"destroyed", ends(kShutdown, returns), 0},
      {"finish", ends(kFinished, finish, returns), 0},
      {"finish_exit", ends(kFinished, finish, exits), 0},
      {"fail", ends(kFailed, fail, returns), 0},
      {"killed_early", ends_early(kKilled, KillMyself), SIGKILL},
      {"fail_early", ends_early(kFailed, fail, exits), 0},
      {"forked", ends(kKilled, [] { ForkAndDie(false); }), SIGKILL},
      {"forked_hooks", ends(kKilled, [] { ForkAndDie(true); }), SIGKILL},
      {"close_in_call", CloseInCall, SIGKILL},
      {"again", Again, 0},
      {"threads", Threads, SIGKILL},
      {"stopped", Stopped, SIGKILL},
  };
}

[[noreturn]] void RunInChild(const Case& one) {
  case_name = one.name;
  alarm(kLimitS);
  try {
    one.run();
  } catch (const std::exception& error) {
    Wrong(error.what());
  }
  exit(0);
}

// Runs all cases at the same time. Returns whether they pass.
bool RunAll(const std::vector<Case>& cases) {
  struct Child {
    const Case* of;
    int rank;
  };
  std::map<pid_t, Child> children;
  for (const Case& one : cases) {
    void* const memory =
        mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Check(memory != MAP_FAILED, "mmap");
    board = new (memory) Board{};
    for (rank = 0; rank < kProcesses; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) RunInChild(one);
      Check(pid > 0, "fork");
      children[pid] = {&one, rank};
    }
  }
  bool passes = true;
  while (!children.empty()) {
    int status;
    const auto [of, its_rank] = children.extract(wait(&status)).mapped();
    if (status == (its_rank == kVictim ? of->victim_status : 0)) continue;
    printf("%s: process %d ends with status %d\n", of->name, its_rank, status);
    passes = false;
    for (const auto& [pid, child] : children) {
      if (child.of == of) kill(pid, SIGKILL);
    }
  }
  return passes;
}

// Whether the warning of a rank that has waited for the device 20 says this, some time after a note
// of that one: it waits for `device` in another operation.
bool Warns(const std::string& says, std::chrono::seconds silence, int64_t device, uint64_t group) {
  jin::Wait wait;
  wait.device_ids = {10, 20};
  wait.rank = 0;
  wait.missing = 1;
  wait.present = 1;
  wait.group = 1;
  wait.site_number = 1;
  wait.limit_s = 1e6;
  wait.reported = true;
  wait.detail = ", late";
  wait.waited = 20s;
  jin::WaitReports reports([](int64_t) { return std::string(); });
  const auto start = jin::Clock::now();
  reports.Hear({20, device, group, 2, 0, "another"}, start);
  const auto outcome = reports.Update({wait}, start + silence, 10s);
  return outcome.warnings.size() == 1 && outcome.warnings[0].find(says) != std::string::npos;
}

// What a peer waited in is forgotten when it has not said so for a while. In a circle of processes
// that don't all watch each other, each one names the next device.
bool NotesOfPeersAreTold() {
  const std::string other = "waits in another operation: another, for device ";
  return Warns("another", 1s, 10, 1) && Warns(", late", 5s, 10, 1) &&
         Warns(other + "30.", 1s, 30, 2) && Warns(other + "10. They wait in a circle", 1s, 10, 2);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Case> cases = Cases();
  if (argc > 1 && argv[1] == std::string("quick")) cases.pop_back();
  const bool passes = NotesOfPeersAreTold() && RunAll(cases);
  printf(passes ? "done\n" : "failed\n");
  return passes ? 0 : 1;
}
