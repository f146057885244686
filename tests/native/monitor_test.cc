// Runs the monitor's watch of the peers (health/monitor.h) in real processes.
//
//   monitor_test [CASE | quick]
//
// Each case has three processes that connect and watch each other. One of them, the victim, ends in
// some way, or stops. Checked is what the others are told: which states, in which order, why, and
// each once. Without arguments all cases run at the same time; "quick" leaves out those in which a
// process is stopped, which take 8 s. Meant for ThreadSanitizer,
// AddressSanitizer and UBSan, too.
#include "xla_ffi/health/monitor.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
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

constexpr char kKilled[] = "has exited without notice";
constexpr char kShutdown[] = "has called jax_intranode.shutdown()";
constexpr char kFinished[] = "has come to the end of its program";
constexpr char kFailed[] = "has failed: KeyError: 'x'";
constexpr char kSilent[] = "has shown no sign of life for 3 s";

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

// Shared by the processes of a case, as JAX's key-value store is.
struct Board {
  struct Process {
    char address[108];
    std::atomic<int> pid;
    std::atomic<int> arrived;  // how many barriers it has come to
    std::atomic<int> round;    // for which its address is
  };
  Process processes[kProcesses];
  std::atomic<int> observers_done;
};
Board* board;

// All processes of the case wait for each other.
void Barrier() {
  const int number = ++board->processes[rank].arrived;
  Await(
      [number] {
        for (const auto& process : board->processes) {
          if (process.arrived < number) return false;
        }
        return true;
      },
      "the other processes");
}

// What the platform was told of each process that changed. The device of a process has the id 10 x
// its number.
struct Event {
  int process;
  PeerState state;
  std::string what;
};
std::mutex events_mutex;
std::vector<Event> events;
size_t seen = 0;  // so many of them have been expected
std::atomic<bool> closed = false;
std::atomic<bool> slow = false;     // whether SetAbsent() takes long
std::atomic<bool> in_call = false;  // a slow one runs

class TestPlatform final : public jin::Platform {
 public:
  bool OnGpu() const override { return false; }
  void SetAbsent(const jin::AbsentDevices& absent) override {
    if (slow) {
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
  void Forget() { known_.fill(PeerState::kRunning); }
  std::vector<jin::Wait> Look(jin::Clock::time_point, jin::Clock::duration) override { return {}; }
  std::vector<jin::Failure> TakeFailures() override { return {}; }
  uint64_t Calls() override { return 0; }

 private:
  std::array<PeerState, kProcesses> known_ = {PeerState::kRunning, PeerState::kRunning,
                                              PeerState::kRunning};
};
TestPlatform platform;

const char* Name(PeerState state) {
  constexpr const char* kNames[] = {"unheard", "running", "silent", "finished",
                                    "left",    "failed",  "lost"};
  return kNames[static_cast<int>(state)];
}

// The next thing that the sink is told is this.
void Expect(PeerState state, const std::string& text, int process = kVictim) {
  Await(
      [] {
        std::lock_guard lock(events_mutex);
        return events.size() > seen;
      },
      (std::string(Name(state)) + " " + text).c_str());
  std::lock_guard lock(events_mutex);
  const Event& event = events[seen++];
  const std::string name = "process " + std::to_string(process) + " (pid " +
                           std::to_string(board->processes[process].pid) + ") ";
  const bool named =
      state == PeerState::kRunning ? event.what.empty() : event.what.starts_with(name + text);
  Check(event.process == process && event.state == state && named,
        std::string("told ") + Name(event.state) + " of process " + std::to_string(event.process) +
            " [" + event.what + "], expected " + Name(state) + " of process " +
            std::to_string(process) + " [" + name + text + "]");
}

void ExpectNothing() {
  std::lock_guard lock(events_mutex);
  if (events.size() > seen) {
    Wrong(std::string("told ") + Name(events[seen].state) + " of process " +
          std::to_string(events[seen].process) + " [" + events[seen].what +
          "], expected nothing more");
  }
}

std::vector<jin::PeerAddress> OtherProcesses() {
  std::vector<jin::PeerAddress> peers;
  for (int process = 0; process < kProcesses; ++process) {
    if (process == rank) continue;
    peers.push_back({process, board->processes[process].address, {10 * process}});
  }
  return peers;
}

// A watch that is connected with all others.
std::unique_ptr<jin::PeerWatch> Connected() {
  auto watch = std::make_unique<jin::PeerWatch>(rank);
  snprintf(board->processes[rank].address, sizeof(Board::Process::address), "%s",
           watch->address().c_str());
  board->processes[rank].pid = getpid();
  Barrier();
  watch->Connect(OtherProcesses(), kSecret, 20);
  Barrier();
  return watch;
}

void Arm(jin::PeerWatch& watch, double silent_s = kLongSilenceS) { watch.Arm(&platform, silent_s); }

jin::PeerWatch::Status StatusOf(const jin::PeerWatch& watch, int process) {
  for (const auto& status : watch.Peers()) {
    if (status.process == process) return status;
  }
  Wrong("no status of process " + std::to_string(process));
}

// Whoever has left may live on: its end is not looked at.
void AwaitEnd(const jin::PeerWatch& watch) {
  Await(
      [&watch] {
        const auto status = StatusOf(watch, kVictim);
        return status.ended != (status.state == PeerState::kLeft);
      },
      "the victim's end");
}

// All observers have seen this before one of them says goodbye.
void MeetObservers() {
  ++board->observers_done;
  Await([] { return board->observers_done == kProcesses - 1; }, "the other observer");
}

// Nothing follows, and a fault is reported once.
void ExpectTheEnd(const jin::PeerWatch& watch, PeerState state, const std::string& text) {
  AwaitEnd(watch);
  std::this_thread::sleep_for(600ms);  // two ticks
  ExpectNothing();
  const auto failures = jin::Monitor::Get().TakeFailures();
  const bool fault = jin::AbsenceIn(state) == jin::Absence::kFault;
  Check(failures.size() == (fault ? 1 : 0), std::to_string(failures.size()) + " failures");
  Check(!fault ||
            (failures[0].process == kVictim && failures[0].message.find(text) != std::string::npos),
        "another failure");
  const auto status = StatusOf(watch, kVictim);
  Check(status.state == state && status.pid == board->processes[kVictim].pid,
        "another status than the sink was told");
  MeetObservers();
}

[[noreturn]] void KillMyself() {
  raise(SIGKILL);
  abort();
}

// A watch that lives until the process ends, as that of a Python program.
jin::PeerWatch* Kept(std::unique_ptr<jin::PeerWatch> watch) {
  static std::unique_ptr<jin::PeerWatch> kept;
  kept = std::move(watch);
  return kept.get();
}

// The victim ends in some way; the others are told `state` and `text` once.
void Ending(PeerState state, const char* text, const std::function<void(jin::PeerWatch&)>& end) {
  jin::PeerWatch* const watch = Kept(Connected());
  Arm(*watch);
  if (rank == kVictim) {
    std::this_thread::sleep_for(50ms);
    return end(*watch);
  }
  Expect(state, text);
  ExpectTheEnd(*watch, state, text);
}

// The same, but the victim ends before the others are armed.
void EndingBeforeArm(PeerState state, const char* text,
                     const std::function<void(jin::PeerWatch&)>& end) {
  jin::PeerWatch* const watch = Kept(Connected());
  if (rank == kVictim) return end(*watch);
  if (rank == 0) std::this_thread::sleep_for(300ms);
  Arm(*watch);
  Expect(state, text);
  ExpectTheEnd(*watch, state, text);
}

void Close(jin::PeerWatch& watch) {
  watch.Close();
  closed = true;
}

// Close() waits until the platform is not told any more.
void CloseInCall() {
  jin::PeerWatch* const watch = Kept(Connected());
  slow = rank != kVictim;
  Arm(*watch);
  if (rank == kVictim) KillMyself();
  Await([] { return in_call.load(); }, "the call");
  Close(*watch);
  Check(!in_call, "Close() returned too early");
}

// SIGSTOP and SIGCONT, and an end while it is stopped.
void Stopped() {
  jin::PeerWatch* const watch = Kept(Connected());
  Arm(*watch, kSilenceS);
  Barrier();
  if (rank == kVictim) {
    Barrier();
    // A process that was stopped itself does not judge others.
    while (board->processes[0].round < 1) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(600ms);
    ExpectNothing();
    ++board->processes[rank].round;
    for (;;) pause();
  }
  const int victim = board->processes[kVictim].pid;
  Barrier();
  if (rank == 0) kill(victim, SIGSTOP);
  Expect(PeerState::kSilent, kSilent);
  Check(!StatusOf(*watch, kVictim).ended, "a process that is stopped has not ended");
  ++board->processes[rank].round;
  Await([] { return board->processes[2 - rank].round >= 1; }, "the other observer");
  if (rank == 0) kill(victim, SIGCONT);
  Expect(PeerState::kRunning, "");
  Await([] { return board->processes[kVictim].round == 1; }, "the victim's check");
  if (rank == 0) kill(victim, SIGSTOP);
  Expect(PeerState::kSilent, kSilent);
  ++board->processes[rank].round;
  Await([] { return board->processes[2 - rank].round >= 2; }, "the other observer");
  if (rank == 0) kill(victim, SIGKILL);
  Expect(PeerState::kLost, kKilled);
  ExpectTheEnd(*watch, PeerState::kLost, kKilled);
}

// A child outlives the victim. One that was made without the C library's fork() keeps copies of the
// victim's sockets: /proc tells of the victim's end.
void ForkAndDie(bool by_fork, const jin::PeerWatch& watch) {
  const pid_t child = by_fork ? fork() : static_cast<pid_t>(syscall(SYS_fork));
  Check(child >= 0, "fork");
  if (child == 0) {
    alarm(kLimitS);
    Check(!by_fork || watch.Peers().empty(), "the watch belongs to the parent");
    while (board->observers_done < kProcesses - 1) std::this_thread::sleep_for(10ms);
    _exit(0);
  }
  Check(watch.Peers().size() == kProcesses - 1, "the parent goes on watching");
  KillMyself();
}

// The child says goodbye for itself, which is none of its parent.
void ChildExits(jin::PeerWatch& watch) {
  const pid_t child = fork();
  Check(child >= 0, "fork");
  if (child == 0) {
    alarm(kLimitS);
    watch.Finish();
    watch.Fail("the child");
    watch.Close();
    _exit(0);
  }
  int status;
  Check(waitpid(child, &status, 0) == child && status == 0, "the child's end");
  watch.Fail("KeyError: 'x'");
  KillMyself();
}

// New watches again and again. All say goodbye at the same time, and none is lost.
void Again() {
  for (int round = 0; round < 20; ++round) {
    closed = false;
    platform.Forget();
    auto watch = Connected();
    Arm(*watch);
    if (round % 2 == 0) Barrier();
    if ((round + rank) % 3 == 0) watch->Finish();
    Close(*watch);
    for (const Event& event : events) {
      Check(jin::AbsenceIn(event.state) != jin::Absence::kFault,
            "told of a fault [" + event.what + "]");
    }
    events.clear();
    Barrier();
  }
}

// Several threads use the watches while peers say goodbye, and while one is killed.
void Threads() {
  std::unique_ptr<jin::PeerWatch> first = Connected(), second = Connected();
  Arm(*first);
  Arm(*second);
  std::atomic<bool> ends = false;
  std::vector<std::thread> threads;
  for (const auto* watch : {first.get(), second.get()}) {
    threads.emplace_back([&ends, watch] {
      while (!ends) {
        for (const auto& status : watch->Peers()) Check(status.pid > 0, "a status without a pid");
        std::this_thread::sleep_for(1ms);
      }
    });
  }
  threads.emplace_back([&ends] {
    while (!ends) {
      jin::Monitor::Get().AwaitNews(100);
      jin::Monitor::Get().TakeFailures();
      jin::Monitor::Get().TakeWarnings();
    }
  });
  Barrier();
  if (rank == kVictim) {
    first->Close();
    std::this_thread::sleep_for(200ms);
    KillMyself();
  }
  Await([&first] { return StatusOf(*first, kVictim).state == PeerState::kLeft; }, "the goodbye");
  Await([&second] { return StatusOf(*second, kVictim).state == PeerState::kLost; }, "the end");
  if (rank == 0) first->Finish();
  ends = true;
  jin::Monitor::Get().EndNews();
  for (std::thread& thread : threads) thread.join();
  Check(StatusOf(*first, kVictim).state == PeerState::kLeft, "a goodbye is final");
  MeetObservers();
  second.reset();
  Close(*first);
}

struct Case {
  const char* name;
  std::function<void()> run;  // in each process
  int victim_status;          // as waitpid() returns it
};

const std::vector<Case>& Cases() {
  using Watch = jin::PeerWatch;
  static const auto fail = [](Watch& watch) { watch.Fail("KeyError: 'x'"); };
  static const auto end = [](auto... steps) {
    return [steps...](Watch& watch) { (steps(watch), ...); };
  };
  static const auto finish = [](Watch& watch) { watch.Finish(); };
  static const auto dies = [](Watch&) { KillMyself(); };
  static const auto exits = [](Watch&) { _exit(0); };
  static const auto returns = [](Watch&) { exit(0); };
  static const auto ending = [](PeerState state, const char* text, auto how) {
    return [=] { Ending(state, text, how); };
  };
  static const auto before_arm = [](PeerState state, const char* text, auto how) {
    return [=] { EndingBeforeArm(state, text, how); };
  };
  constexpr PeerState kLeft = PeerState::kLeft, kFinish = PeerState::kFinished,
                      kFail = PeerState::kFailed, kLost = PeerState::kLost;
  static const std::vector<Case> cases = {
      {"killed", ending(kLost, kKilled, dies), SIGKILL},
      {"exit", ending(kLost, kKilled, exits), 0},
      {"close", ending(kLeft, kShutdown, end(Close, exits)), 0},
      {"destroyed", ending(kLeft, kShutdown, returns), 0},
      {"finish", ending(kFinish, kFinished, end(finish, returns)), 0},
      {"finish_exit", ending(kFinish, kFinished, end(finish, exits)), 0},
      {"fail", ending(kFail, kFailed, end(fail, returns)), 0},
      {"killed_early", before_arm(kLost, kKilled, dies), SIGKILL},
      {"fail_early", before_arm(kFail, kFailed, end(fail, exits)), 0},
      {"stopped", Stopped, SIGKILL},
      {"forked", ending(kLost, kKilled, [](Watch& w) { ForkAndDie(false, w); }), SIGKILL},
      {"forked_hooks", ending(kLost, kKilled, [](Watch& w) { ForkAndDie(true, w); }), SIGKILL},
      {"forked_exits", ending(kFail, kFailed, ChildExits), SIGKILL},
      {"close_in_call", CloseInCall, SIGKILL},
      {"again", Again, 0},
      {"threads", Threads, SIGKILL},
  };
  return cases;
}

// Runs a case in new processes. Returns whether it passes.
bool Run(const Case& run) {
  case_name = run.name;
  void* const memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Wrong("mmap");
  board = new (memory) Board{};
  pid_t pids[kProcesses];
  for (rank = 0; rank < kProcesses; ++rank) {
    pids[rank] = fork();
    if (pids[rank] < 0) Wrong("fork");
    if (pids[rank] > 0) continue;
    alarm(kLimitS);
    try {
      run.run();
    } catch (const std::exception& error) {
      Wrong(error.what());
    }
    exit(0);
  }
  rank = -1;
  bool passes = true;
  for (int ended = 0; ended < kProcesses; ++ended) {
    int status;
    const pid_t pid = wait(&status);
    for (int process = 0; process < kProcesses; ++process) {
      if (pids[process] != pid) continue;
      if (status == (process == kVictim ? run.victim_status : 0)) continue;
      printf("%s: process %d ends with status %d\n", run.name, process, status);
      passes = false;
      for (const pid_t other : pids) kill(other, SIGKILL);
    }
  }
  fflush(stdout);
  return passes;
}

}  // namespace

// The return of one peer does not hide the absence of another.
bool AbsentDevicesAreASet() {
  using enum PeerState;
  const auto in = [](PeerState b, PeerState c) {
    jin::AbsentDevices absent;
    absent.Add(20, {b, {}, "b"});
    absent.Add(30, {c, {}, "c"});
    const auto* worst = absent.WorstIn({10, 20, 30});
    return worst == nullptr ? "" : worst->what;
  };
  return in(kSilent, kLeft) == "c" && in(kRunning, kLeft) == "c" && in(kLost, kLeft) == "b" &&
         in(kRunning, kRunning).empty();
}

// What several meshes know of a device: the worst counts, in whatever order they are asked.
bool TheWorstOfAllMeshesCounts() {
  using enum PeerState;
  for (const auto& [first, second] : {std::pair{kLost, kRunning}, std::pair{kRunning, kLost}}) {
    jin::AbsentDevices absent;
    absent.Add(10, {first, {}, ""});
    absent.Add(10, {second, {}, ""});
    if (absent.Find(10) == nullptr || absent.Find(10)->state != kLost) return false;
  }
  return true;
}

// A call gives up for a peer that may come back when both have lasted: its wait, and the absence.
bool PatienceIsForBoth() {
  using std::chrono::hours;
  constexpr jin::Absence kIfWaited = jin::Absence::kIfWaited;
  return !jin::GivesUp(kIfWaited, hours(1), {}) && !jin::GivesUp(kIfWaited, {}, hours(1)) &&
         jin::GivesUp(kIfWaited, hours(1), hours(1));
}

// The warning of a rank that has waited for the device 20, some time after a note of that one.
std::string WarningAfter(std::chrono::seconds silence, const jin::WaitNote& note) {
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
  reports.Hear(note, start);
  const auto outcome = reports.Update({wait}, start + silence, 10s);
  return outcome.warnings.size() == 1 ? outcome.warnings[0] : "";
}

// What a peer waited in is forgotten when it has not said so for a while, and what this process
// waited in as soon as it does not.
bool OldNotesAreForgotten() {
  const jin::WaitNote note{20, 10, 1, 2, 0, "another"};
  return WarningAfter(1s, note).find("another") != std::string::npos &&
         WarningAfter(5s, note).find(", late") != std::string::npos;
}

// In a circle of processes that don't all watch each other, each one names the next device.
bool AWaitElsewhereNamesItsDevice() {
  const auto says = [](const jin::WaitNote& note, const char* text) {
    return WarningAfter(1s, note).find(text) != std::string::npos;
  };
  return says({20, 30, 2, 2, 0, "another"},
              "waits in another operation: another, for device 30.") &&
         says({20, 10, 2, 2, 0, "another"},
              "waits in another operation: another, for device 10. They wait in a circle");
}

int main(int argc, char** argv) {
  if (!OldNotesAreForgotten()) {
    printf("old notes count\n");
    return 1;
  }
  if (!AWaitElsewhereNamesItsDevice()) {
    printf("a warning does not say for whom a peer waits\n");
    return 1;
  }
  if (!AbsentDevicesAreASet() || !TheWorstOfAllMeshesCounts() || !PatienceIsForBoth()) {
    printf("absent devices are not judged as they should be\n");
    return 1;
  }
  const bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
  if (argc > 1 && !quick) {
    for (const Case& one : Cases()) {
      if (strcmp(one.name, argv[1]) == 0) return Run(one) ? 0 : 1;
    }
    printf("unknown case\n");
    return 2;
  }
  std::vector<pid_t> runs;
  for (const Case& one : Cases()) {
    if (quick && strstr(one.name, "stopped") != nullptr) continue;
    const pid_t pid = fork();
    if (pid == 0) _exit(Run(one) ? 0 : 1);
    runs.push_back(pid);
  }
  bool passes = true;
  for (const pid_t pid : runs) {
    int status;
    passes &= waitpid(pid, &status, 0) == pid && status == 0;
  }
  printf(passes ? "done\n" : "failed\n");
  return passes ? 0 : 1;
}
