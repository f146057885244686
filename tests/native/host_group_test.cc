// Runs xla_ffi/host/host_group.h without XLA: several HostGroups stand for the processes of one
// group of ranks and share its regions in one address space. Meant for ThreadSanitizer, too.
//
//   host_group_test sound|mesh RANKS PROCESSES ROUNDS
//   host_group_test others
//
// sound: each rank has two threads that arrive at the same 12 call sites in an order of their own,
// as XLA's threads do, and start the next round without waiting for other ranks. Types, algorithms,
// sizes, addresses and numbers of segments are mixed, and guard bytes lie around operands and
// results. Some calls are awaited with Then(), some with Progress(). The epoch wraps in the middle.
// Permutes run in groups of their own. mesh: the same on a hybrid cube mesh. others: the functions
// behind Sound(). Exit status 0: everything is right; 1: something is wrong, and a line says what.
#include "xla_ffi/host/host_group.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "jax_intranode/include/jax_intranode/peer.h"
#include "tests/native/kernel_of.h"
#include "tests/native/regions.h"
#include "tests/native/tables.h"
#include "xla_ffi/ffi/site_numbers.h"
#include "xla_ffi/health/waits.h"
#include "xla_ffi/host/segment.h"

namespace jin = jax_intranode;
using namespace std::chrono_literals;

namespace {

constexpr int kSites = 12;
constexpr int kThreads = 2;
constexpr size_t kMaxBytes = 3000;
constexpr size_t kEpochBufferBytes = 128 << 10;
constexpr auto kPatience = 30s;
constexpr auto kNever = std::chrono::hours(1);
constexpr auto kLimit = 1000s;  // it passes for the monitor alone (TestMonitor::Pass)
// Of some sizes, and with packets of both kinds. The cases in Python run all, and extremes.
constexpr jin::ElementType kTypes[] = {jin::ElementType::kI8, jin::ElementType::kBF16,
                                       jin::ElementType::kF32};

using Groups = std::vector<std::shared_ptr<jin::HostGroup>>;
using Ticket = std::shared_ptr<jin::Ticket>;

bool on_mesh = false;  // whether the ranks are a hybrid cube mesh
volatile sig_atomic_t signals = 0;

[[noreturn]] void Wrong(const std::string& what) {
  printf("WRONG: %s\n", what.c_str());
  fflush(stdout);
  std::_Exit(1);
}

void Require(bool condition, const std::string& what) {
  if (!condition) Wrong(what);
}

void RequireText(const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) {
    Require(text.find(part) != text.npos, "no \"" + part + "\" in: " + text);
  }
}

// The groups of `processes` processes, each of which has a contiguous part of the ranks. The device
// of rank r has the id 10 + r.
Groups GroupsOf(const jin::Regions& regions, int processes, std::chrono::nanoseconds timeout) {
  jin::Group layout{};
  regions.GiveTo(&layout);
  std::vector<int64_t> ids;
  std::vector<std::vector<int>> local(processes);
  for (int r = 0; r < regions.ranks(); ++r) {
    ids.push_back(10 + r);
    local[r * processes / regions.ranks()].push_back(r);
  }
  Groups groups;
  for (const std::vector<int>& ranks : local) {
    groups.push_back(std::make_shared<jin::HostGroup>(layout, ranks, ids, timeout, nullptr));
  }
  return groups;
}

std::string NameOf(int rank) {
  return "rank " + std::to_string(rank) + " (device " + std::to_string(10 + rank) + ")";
}

// Watches over groups as the monitor (health/monitor.h) does: each hears what the others wait in.
class TestMonitor {
 public:
  explicit TestMonitor(Groups groups)
      : groups_(std::move(groups)),
        reports_(groups_.size(), jin::WaitReports([](int64_t) { return std::string(); })) {}

  // To the monitor it seems that so much time passes, in which it looks each second.
  void Pass(std::chrono::seconds time) {
    const auto end = passed_ + time;
    for (LookAtAll(); passed_ < end; LookAtAll()) passed_ += 1s;
  }

 private:
  void LookAtAll() {
    const jin::Clock::time_point now = jin::Clock::now() + passed_;
    for (size_t i = 0; i < groups_.size(); ++i) {
      std::vector<jin::Wait> waits;
      groups_[i]->Look(now, {}, &waits);
      const auto outcome = reports_[i].Update(waits, now, kNever);
      for (const jin::WaitNote& note : outcome.notes) {
        for (size_t other = 0; other < reports_.size(); ++other) {
          if (other != i) reports_[other].Hear(note, now);
        }
      }
      for (const auto& [wait, reason] : outcome.over) wait.give_up(jin::Failure(reason, wait));
    }
  }

  const Groups groups_;
  std::vector<jin::WaitReports> reports_;
  std::chrono::seconds passed_{0};
};

// The call at a site in a round: the same on all ranks.
struct Plan {
  int ranks, seed;
  jin::HostGroup::Operation operation;
  size_t items, pieces;
  // Of a permute: of each piece the source of each rank, or -1.
  std::vector<jin::Permutation> sources = {};
  jin::RaggedTables tables = {};  // of a ragged all-to-all, with an item a row

  static Plan Of(int ranks, int round, int site) {
    std::mt19937 random(round * 1000 + site);
    for (int k = 0; k < 8; ++k) random();
    const jin::ElementType type = kTypes[random() % std::size(kTypes)];
    constexpr size_t kKinds = std::size(jin::kCollectives);
    const size_t drawn = random() % (kKinds + 4);
    const jin::Algorithm algorithm = on_mesh          ? jin::Algorithm::kHybridCubeMesh
                                     : drawn < kKinds ? jin::kCollectives[drawn]
                                     : drawn > kKinds ? jin::Algorithm::kPermute
                                                      : jin::Algorithm::kRagged;
    // Small ones and large ones: a large one is still on its way when a small one begins.
    const size_t bytes = random() % 2 == 0 ? 1 + random() % 60 : 1 + random() % kMaxBytes;
    const size_t items = 1 + bytes / jin::ItemBytes(type);
    const bool permutes = algorithm == jin::Algorithm::kPermute;
    const bool one = random() % 2 == 0 || !(jin::IsAllReduce(algorithm) || permutes);
    const bool cut = jin::RunsInSegments(algorithm) && random() % 2 == 0;
    const uint32_t segments = cut ? 2 + 2 * (random() % 3) : 1;
    Plan plan{ranks, 13 * round + 5 * site, {algorithm, type, segments}, items, 1};
    if (!one) plan.pieces = std::min<size_t>(items, 5);
    for (size_t k = 0; k < plan.pieces && permutes; ++k) {
      plan.sources.push_back(jin::RandomPermutation(ranks, &random));
    }
    if (algorithm == jin::Algorithm::kRagged) {
      plan.tables = jin::RaggedTables::Of(ranks, static_cast<uint32_t>(items), 32, &random);
    }
    return plan;
  }

  jin::Algorithm algorithm() const { return operation.algorithm; }
  bool Permutes() const { return algorithm() == jin::Algorithm::kPermute; }
  bool MayBeInPlace() const {
    return jin::IsAllReduce(algorithm()) || algorithm() == jin::Algorithm::kAllToAll || Permutes();
  }
  size_t bytes() const { return items * jin::ItemBytes(operation.type); }
  // The buffers of the call: pieces of one, whose last is the longest.
  jin::Buffers Cut(const char* in, char* out) const {
    jin::Buffers buffers;
    const size_t each = items / pieces * jin::ItemBytes(operation.type);
    for (size_t k = 0; k < pieces; ++k) {
      const size_t begin = k * each, end = k + 1 == pieces ? bytes() : begin + each;
      buffers.Append({in + begin, out + begin, end - begin});
    }
    return buffers;
  }
  Ticket Arrive(jin::HostGroup& group, int rank, uint64_t site, const char* in, char* out) const {
    const auto arrive = [&](const auto& call) { return group.Arrive(rank, site, operation, call); };
    if (tables.updates > 0) {
      return arrive(tables.CallOf(rank, in, out, jin::ItemBytes(operation.type)));
    }
    const jin::Buffers buffers = Cut(in, out);
    if (on_mesh) return arrive(jin::LinkedBuffers{buffers, jin::LinksOf(rank, ranks)});
    if (!Permutes()) return arrive(buffers);
    jin::Permutes members;
    for (size_t k = 0; k < pieces; ++k) {
      jin::AddMember(&members, buffers.buffer[k], sources[k], rank);
    }
    return arrive(members);
  }

  // Values whose sums every type holds exactly.
  int Value(int rank, size_t i) const {
    return static_cast<int>((rank * 7 + seed + i * 3 + i / 16) % 16) - 7;
  }
  void Append(int value, std::vector<char>* to) const {
    const auto real = std::bit_cast<std::array<char, 4>>(static_cast<float>(value));
    if (operation.type == jin::ElementType::kF32) {
      to->insert(to->end(), real.begin(), real.end());
    } else if (operation.type == jin::ElementType::kBF16) {
      to->insert(to->end(), real.begin() + 2, real.end());
    } else {
      to->push_back(static_cast<char>(value));
    }
  }
  std::vector<char> Input(int rank) const {
    std::vector<char> input;
    const size_t all = items * jin::InputShards(algorithm(), ranks);
    for (size_t i = 0; i < all; ++i) Append(Value(rank, i), &input);
    return input;
  }
  std::vector<char> Expected(int rank) const {
    std::vector<char> output;
    for (size_t i = 0; i < items * jin::OutputShards(algorithm(), ranks); ++i) {
      const size_t at = (jin::InputShards(algorithm(), ranks) > 1 ? rank * items : 0) + i % items;
      if (algorithm() == jin::Algorithm::kRagged) {
        const auto [source, row] = tables.OriginOf(rank, i);
        if (source >= 0) {
          Append(Value(source, row), &output);
        } else {
          output.insert(output.end(), jin::ItemBytes(operation.type), jin::Guarded::kGuard);
        }
      } else if (Permutes()) {
        const int source = sources[std::min(i / (items / pieces), pieces - 1)][rank];
        Append(source < 0 ? 0 : Value(source, i), &output);
      } else if (jin::OnlyCopies(algorithm())) {
        Append(Value(static_cast<int>(i / items), at), &output);
      } else {
        int sum = 0;
        for (int r = 0; r < ranks; ++r) sum += Value(r, at);
        Append(sum, &output);
      }
    }
    return output;
  }
};

// Awaits a ticket as a handler that has returned a future.
std::string AwaitByThen(jin::HostGroup& group, const Ticket& ticket) {
  const auto told = std::make_shared<std::promise<std::string>>();
  group.KeepMoving();
  ticket->Then([told](const std::string& error) { told->set_value(error); });  // throws if it was
  auto error = told->get_future();
  if (error.wait_for(kPatience) != std::future_status::ready) {
    Wrong("a wait without end by Then()");
  }
  return error.get();
}

// Awaits a ticket as a handler that has not returned yet, and moves these groups.
std::string AwaitByProgress(const Groups& groups, const Ticket& ticket) {
  const auto start = jin::Clock::now();
  while (!ticket->Done()) {
    if (jin::Clock::now() - start > kPatience) Wrong("a wait without end by Progress()");
    std::this_thread::yield();
    for (const auto& group : groups) group->Progress();
  }
  return ticket->Error();
}

// What a thread of a rank does in a round; returns the number of calls. `own` are the groups of its
// process: that of permutes, and the other one. Peers may wait for this rank in either.
int RunRound(int ranks, int rank, int thread, int round, const Groups& own, std::mt19937& random) {
  struct Call {
    int site;
    Plan plan;
    jin::Guarded in, out;
    Ticket ticket = nullptr;
  };
  std::mt19937 shared(round * 100 + rank);
  std::vector<Call> calls;
  for (int site = 0; site < kSites; ++site) {
    // Which of the rank's threads arrives at a site: both draw the same number.
    if (static_cast<int>(shared() % kThreads) != thread) continue;
    const Plan plan = Plan::Of(ranks, round, site);
    const std::vector<char> input = plan.Input(rank);
    const size_t shift = random() % 16, bytes = plan.Expected(rank).size();
    calls.push_back({site, plan, {input.size(), random() % 16}, {bytes, shift}});
    std::copy(input.begin(), input.end(), calls.back().in.data());
  }
  std::shuffle(calls.begin(), calls.end(), random);
  for (Call& call : calls) {
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
    const bool in_place = random() % 4 == 0 && call.plan.MayBeInPlace();
    if (in_place) memcpy(call.out.data(), call.in.data(), call.in.size());
    call.ticket = call.plan.Arrive(*own[call.plan.Permutes() ? 0 : 1], rank, call.site,
                                   (in_place ? call.out : call.in).data(), call.out.data());
  }
  for (const Call& call : calls) {
    const bool waits = random() % 2 == 0;
    for (const auto& group : own) {
      if (waits) group->KeepMoving();
    }
    const std::string error = waits ? AwaitByThen(*own[call.plan.Permutes() ? 0 : 1], call.ticket)
                                    : AwaitByProgress(own, call.ticket);
    const std::string where = "rank " + std::to_string(rank) + ", round " + std::to_string(round) +
                              ", site " + std::to_string(call.site) + ": ";
    Require(error.empty(), where + error);
    Require(call.out.Holds(call.plan.Expected(rank)), where + "wrong result");
    Require(call.in.Holds(call.plan.Input(rank)), where + "the operand has changed");
  }
  return static_cast<int>(calls.size());
}

void Sound(int ranks, int processes, int rounds) {
  // Permutes have regions of their own.
  const jin::Regions of_permutes(ranks, kEpochBufferBytes, 0u - rounds),
      regions(ranks, kEpochBufferBytes, 0u - rounds * kSites / 2);
  const Groups permuting = GroupsOf(of_permutes, processes, kNever),
               groups = GroupsOf(regions, processes, kNever);
  std::atomic<uint64_t> checked{0};
  std::vector<std::thread> threads;
  std::deque<std::barrier<>> barriers;
  for (int r = 0; r < ranks; ++r) {
    auto& barrier = barriers.emplace_back(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, r, t] {
        const int process = r * processes / ranks;
        std::mt19937 random(r * 10 + t);
        for (int round = 0; round < rounds; ++round) {
          checked += RunRound(ranks, r, t, round, {permuting[process], groups[process]}, random);
          barrier.arrive_and_wait();  // a device runs one program after the other
        }
      });
    }
  }
  for (std::thread& t : threads) t.join();
  for (const Groups* all : {&groups, &permuting}) {
    for (const auto& group : *all) Require(group->failure().empty(), group->failure());
  }
  Require(checked == static_cast<uint64_t>(ranks) * kSites * rounds, "calls are left out");
  Require(jin::host_operations == checked, "operations are not counted as they are");
  Require(regions.BytesLeft() + of_permutes.BytesLeft() == 0, "bytes left in an epoch buffer");
}

// A rank's arrival with a buffer that lives as long as the program.
Ticket ArriveWith(jin::HostGroup& group, int rank, int site, size_t bytes = 400,
                  jin::HostGroup::Operation operation = {jin::Algorithm::kOneShot,
                                                         jin::ElementType::kF32}) {
  static auto& all = *new std::deque<std::vector<char>>;
  char* const data = all.emplace_back(bytes).data();
  jin::Buffers buffers;
  buffers.Append({data, data, bytes});
  return group.Arrive(rank, site, operation, buffers);
}

// All that have arrived wait for what is missing.
void Settle(const Groups& groups) {
  for (int k = 0; k < 100; ++k) groups[k % groups.size()]->Progress();
}

// Rank 0 and rank 1 permute among themselves, far ahead of rank 2, which reads the log of rank 0's
// process later.
void Behind() {
  constexpr int kRanks = 3, kCalls = 3000;
  const jin::Regions regions(kRanks, kEpochBufferBytes, 0u - kCalls / 2);
  const Groups groups = GroupsOf(regions, kRanks, kNever);
  const float in = 1;
  float out[kRanks] = {-1, -1, -1};
  std::vector<Ticket> tickets[kRanks];
  const auto arrive = [&](int r) {
    for (int k = 0; k < kCalls; ++k) {
      jin::Permutes call;
      call.Append({&in, &out[r], sizeof in}, r == 1 ? 0 : -1, r == 0 ? 1 : -1);
      tickets[r].push_back(
          groups[r]->Arrive(r, 0, {jin::Algorithm::kPermute, jin::ElementType::kF32}, call));
    }
  };
  arrive(0);
  arrive(1);
  for (const int r : {0, 1}) AwaitByProgress({groups[0], groups[1]}, tickets[r][999]);
  for (int k = 0; k < 10000; ++k) groups[k % 2]->Progress();  // as far ahead as they can
  arrive(2);
  for (const auto& of_rank : tickets) {
    const std::string error = AwaitByProgress(groups, of_rank.back());
    Require(error.empty(), error);
  }
  Require(out[0] == 0 && out[1] == 1 && out[2] == 0, "the last result");
}

// All ranks but one arrive; the error must name this one, and the rank that reads it.
void Deadline(int ranks, int processes, int missing) {
  const jin::Regions regions(ranks, kEpochBufferBytes);
  const Groups groups = GroupsOf(regions, processes, kLimit);
  TestMonitor monitor(groups);
  const auto group_of = [&](int rank) -> jin::HostGroup& {
    return *groups[rank * processes / ranks];
  };
  // A call at which all ranks arrive works.
  std::vector<Ticket> first, tickets(ranks);
  for (int r = 0; r < ranks; ++r) first.push_back(ArriveWith(group_of(r), r, 0));
  for (int r = 0; r < ranks; ++r) Require(AwaitByThen(group_of(r), first[r]).empty(), "the first");
  for (int r = 0; r < ranks; ++r) {
    if (r != missing) tickets[r] = ArriveWith(group_of(r), r, 0);
  }
  Settle(groups);
  monitor.Pass(kLimit / 2);
  for (int r = 0; r < ranks; ++r) Require(r == missing || !tickets[r]->Done(), "too soon");
  monitor.Pass(kLimit / 2);
  for (int r = 0; r < ranks; ++r) {
    if (r == missing) continue;
    const std::string error = AwaitByThen(group_of(r), tickets[r]);
    RequireText(error, {"psum of 400 bytes timed out", "waited for", "JAX_INTRANODE_TIMEOUT_S"});
    // Ranks of one process have the error of the first one, and others may wait for those.
    if (ranks < 4 || r * processes / ranks == missing * processes / ranks) {
      RequireText(error, {"waited for " + NameOf(missing)});
    }
    if (ranks == processes) RequireText(error, {NameOf(r) + " waited"});
    Require(group_of(r).failure() == error, "failure() is another text");
    // Every later call has the same error, at once.
    const Ticket later = ArriveWith(group_of(r), r, 1);
    bool called = false;
    later->Then([&](const std::string& text) { called = text == error; });
    Require(later->Done() && called, "a later call: " + later->Error());
  }
}

// Two processes run an operation in segments, of which all together take longer than the time
// limit. Then rank 1 stops.
void DeadlineAmidSegments() {
  const jin::Regions regions(2, kEpochBufferBytes);
  const Groups groups = GroupsOf(regions, 2, 2500ms);
  TestMonitor monitor({groups[0]});
  Ticket ticket;
  for (int r : {0, 1}) {
    const Ticket own =
        ArriveWith(*groups[r], r, 0, 4000, {jin::Algorithm::kTwoShot, jin::ElementType::kF32, 16});
    if (r == 0) ticket = own;
  }
  // Each of these steps ends a segment on rank 0.
  for (int step = 0; step < 5; ++step) {
    groups[1]->Progress();
    std::this_thread::sleep_for(600ms);
    groups[0]->Progress();
    monitor.Pass(0s);
    Require(groups[0]->failure().empty(), "a rank that goes on: " + groups[0]->failure());
  }
  Require(!ticket->Done(), "done without its peer");
  monitor.Pass(3s);
  RequireText(AwaitByThen(*groups[0], ticket),
              {"psum of 4000 bytes timed out", NameOf(0), NameOf(1), "whose data has not arrived"});
}

// A rank sends its data, and is lost before the rank that waits looks again.
void LostAfterItsData() {
  const jin::Regions regions(2, kEpochBufferBytes);
  const Groups groups = GroupsOf(regions, 2, kNever);
  const Ticket waiting = ArriveWith(*groups[0], 0, 0);
  ArriveWith(*groups[1], 1, 0);
  jin::AbsentDevices absent;
  absent.Add(11, {jin::PeerState::kLost, {}, "its process has ended"});
  groups[0]->SetAbsent(absent);
  const std::string error = AwaitByThen(*groups[0], waiting);
  Require(error.empty(), "a call that had all data: " + error);
}

// Rank 0 waits at the first site, and rank 1 at the second one, at which rank 0 may have arrived
// next: then that is no mismatch, but rank 1 is late in the first. (What both are told when they
// are processes: tests/multiprocess.)
void Mismatch(int processes, bool same_calls) {
  const jin::Regions regions(2, kEpochBufferBytes);
  const Groups groups = GroupsOf(regions, processes, kLimit);
  TestMonitor monitor(groups);
  const Ticket waiting = ArriveWith(*groups[0], 0, 0), next = ArriveWith(*groups[0], 0, same_calls);
  ArriveWith(*groups.back(), 1, 1);
  Settle(groups);
  monitor.Pass(kLimit);
  const std::string error = AwaitByThen(*groups[0], waiting);
  RequireText(error, {"timed out", "waited for " + NameOf(1)});
  const bool is_mismatch = error.find("which waits in another operation: psum") != error.npos;
  Require(is_mismatch != same_calls, error);
  Require(AwaitByThen(*groups[0], next) == error, "a call that waits behind: " + next->Error());
  const auto reason = groups[0]->TakeFailures().at(0).reason;
  Require((reason == jin::FailureReason::kMismatch) != same_calls, "the reason of a failure");
}

// A body of a user waits for a rank that does not come, or that the group does not have, and is
// slow to end: its call fails when it has.
void Bodies() {
  for (const int named : {1, 2, 7, -1, INT32_MIN, INT32_MAX}) {
    const jin::Regions regions(2, kEpochBufferBytes);
    const Groups groups = GroupsOf(regions, 2, kLimit);
    TestMonitor monitor({groups[0]});
    std::atomic<bool> ended{false};
    const auto body = std::make_shared<jin::HostBody>("shift", [&](jin::v1::HostWait* wait) {
      jin::v1::HostThread thread(wait);
      while (thread.Wait(named)) {
      }
      std::this_thread::sleep_for(20ms);
      ended = true;
    });
    const Ticket ticket = groups[0]->Arrive(0, 0, body);
    groups[0]->KeepMoving();
    while (body->missing() != named) std::this_thread::yield();
    Settle({groups[0]});
    monitor.Pass(kLimit);
    const std::string error = AwaitByThen(*groups[0], ticket);
    Require(ended, "a call fails before its body has ended");
    RequireText(error, {"shift timed out after 1000 s: " + NameOf(0) + " waited for " +
                        (named == 1 ? NameOf(1) : "an unknown rank")});
    const auto later = groups[0]->Arrive(0, 0, std::make_shared<jin::HostBody>("shift", nullptr));
    Require(later->Error() == error, "a later call: " + later->Error());
  }
}

// The numbers of equal calls (ffi/site_numbers.h). A program with two equal calls is compiled by
// this thread, and one is loaded, whose calls nobody has lowered. Another thread compiles beside
// them.
void Sites() {
  constexpr uint64_t kCompiled = 1, kLoaded = 2, kBeside = 3;
  jin::SiteNumbers& numbers = jin::SiteNumbers::Get();
  const auto compile_beside = [&](uint64_t description) {
    std::thread([&] {
      numbers.Lower(description);
      Require(numbers.Take(description) == 0, "a thread does not count its own calls from 0 on");
      numbers.EndCompilation();
    }).join();
  };
  numbers.Lower(kCompiled);
  for (const uint64_t description : {kCompiled, kLoaded}) {
    for (uint32_t number : {0, 1}) {
      Require(numbers.Take(description) == number, "equal calls are not numbered in their order");
    }
  }
  compile_beside(kBeside);
  Require(numbers.Take(kCompiled) == 2, "a thread beside disturbs a count");
  Require(numbers.Take(kLoaded) == 0, "calls of a loaded program are numbered on");
  numbers.EndCompilation();
  Require(numbers.Take(kCompiled) == 0, "a count does not start anew with the next program");
  Require(numbers.Take(kLoaded) == 0, "calls of a loaded program are numbered on");
  compile_beside(kCompiled);
  Require(numbers.Take(kCompiled) == 0, "a program that another thread lowers is numbered on");
}

// A segment of shared memory is reserved while signals arrive, on versions of Linux where one ends
// the reservation.
void Signals() {
  struct sigaction action{};
  action.sa_handler = [](int) { signals = signals + 1; };
  sigaction(SIGALRM, &action, nullptr);
  const auto segment = jin::SharedMemory::Allocate(0, 1 << 20, true);
  Require(signals == 1, "the signal is lost");
  segment->address()[segment->bytes() - 1] = 1;
  raise(SIGALRM);
  Require(signals == 2, "later signals are not taken");
}

void Others() {
  Behind();
  DeadlineAmidSegments();
  LostAfterItsData();
  // Over processes: the follower, then the leader is missing; then a rank of three. In one process.
  // Two ranks a process, one of which is missing in the first or the second.
  for (const auto& [ranks, processes, missing] : std::vector<std::array<int, 3>>{
           {2, 2, 1}, {2, 2, 0}, {3, 3, 1}, {2, 1, 0}, {4, 1, 2}, {4, 2, 1}, {4, 2, 2}}) {
    Deadline(ranks, processes, missing);
  }
  for (const int processes : {1, 2}) Mismatch(processes, false);
  Mismatch(2, true);
  Bodies();
  Sites();
  Signals();
}

}  // namespace

// Takes the place of the C library's function. A signal arrives during each call.
extern "C" int posix_fallocate(int fd, off_t, off_t bytes) {
  const int before = signals;
  raise(SIGALRM);
  return signals != before ? EINTR : ftruncate(fd, bytes);
}

int main(int argc, char** argv) {
  if (argc < 5) {
    Others();
  } else {
    on_mesh = std::string(argv[1]) == "mesh";
    Sound(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
  }
  printf("done\n");
}
