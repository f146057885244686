// Runs xla_ffi/host/host_group.h without XLA: several HostGroups stand for the processes of one
// group of ranks and share its regions in one address space. Meant for ThreadSanitizer, too.
//
//   host_group_test sound|mesh [ranks] [processes] [rounds]
//   host_group_test guards [ranks] | behind | deadline | mismatch | fail | bodies | sites
//
// sound: each rank has two threads that arrive at the same 12 call sites in an order of their own,
// as XLA's threads do, and start the next round without waiting for other ranks. Types, algorithms,
// sizes and numbers of segments are mixed. Some calls are awaited with Then(), some with
// Progress(). The epoch wraps in the middle. Permutes run in groups of their own. mesh: the same on
// a hybrid cube mesh. guards: inputs and results of every small size at every address, between
// guard bytes. behind: two ranks permute far ahead of a third one. deadline: ranks that never
// arrive. mismatch: ranks that call different operations. bodies: bodies of users that wait in
// vain. fail: Fail() before, while and after ranks arrive. sites: the numbers of equal calls
// (ffi/site_numbers.h) when programs are compiled. Exit status 0: everything is right; 1: something
// is wrong, and a line says what.
#include "xla_ffi/host/host_group.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "jax_intranode/include/jax_intranode/peer.h"
#include "tests/native/kernel_of.h"
#include "tests/native/permutations.h"
#include "tests/native/ragged_tables.h"
#include "tests/native/test_monitor.h"
#include "xla_ffi/ffi/site_numbers.h"
#include "xla_ffi/health/call_sites.h"

namespace jin = jax_intranode;

namespace {

constexpr int kSites = 12;
constexpr int kThreads = 2;
constexpr size_t kMaxBytes = 3000;
constexpr size_t kEpochBufferBytes = 128 << 10;
constexpr auto kPatience = std::chrono::seconds(30);
constexpr auto kNever = std::chrono::hours(1);
// A limit that passes for the monitor alone (TestMonitor::Pass).
constexpr auto kLimit = std::chrono::seconds(1000);

using Clock = std::chrono::steady_clock;

bool on_mesh = false;  // whether the ranks are a hybrid cube mesh

[[noreturn]] void Wrong(const std::string& what) {
  printf("WRONG: %s\n", what.c_str());
  fflush(stdout);
  std::_Exit(1);
}

void Require(bool condition, const std::string& what) {
  if (!condition) Wrong(what);
}

// The call at a site in a round: the same on all ranks.
struct Plan {
  jin::HostGroup::Operation operation;
  size_t items;
  size_t pieces;
  // Of a permute: of each piece the source of each rank, or -1.
  std::vector<jin::Permutation> sources = {};
  jin::RaggedTables tables = {};  // of a ragged all-to-all, with an item a row

  static Plan Of(int ranks, int round, int site) {
    std::mt19937 random(round * 1000 + site);
    for (int k = 0; k < 8; ++k) random();
    jin::ElementType type = jin::kElementTypes[random() % std::size(jin::kElementTypes)];
    constexpr size_t kKinds = std::size(jin::kCollectives), kExtremes = std::size(jin::kExtremes);
    const size_t drawn = random() % (kKinds + kExtremes + 4);
    jin::Algorithm algorithm = drawn < kKinds                ? jin::kCollectives[drawn]
                               : drawn < kKinds + kExtremes  ? jin::kExtremes[drawn - kKinds]
                               : drawn == kKinds + kExtremes ? jin::Algorithm::kRagged
                                                             : jin::Algorithm::kPermute;
    if (on_mesh) algorithm = jin::Algorithm::kHybridCubeMesh;
    if (!jin::HasKernel(algorithm, type)) type = jin::ElementType::kI32;
    // Small ones and large ones: a large one is still on its way when a small one begins.
    const size_t bytes = random() % 2 == 0 ? 1 + random() % 60 : 1 + random() % kMaxBytes;
    const size_t items = 1 + bytes / jin::ItemBytes(type);
    const bool permutes = algorithm == jin::Algorithm::kPermute;
    const bool one = random() % 2 == 0 || !(Reduces(algorithm) || permutes);
    const bool cut = jin::RunsInSegments(algorithm) && random() % 2 == 0;
    const uint32_t segments = cut ? 2 + 2 * (random() % 3) : 1;
    Plan plan{{algorithm, type, segments}, items, one ? 1 : std::min<size_t>(items, 5)};
    for (size_t k = 0; k < plan.pieces && permutes; ++k) {
      plan.sources.push_back(jin::RandomPermutation(ranks, &random));
    }
    if (algorithm == jin::Algorithm::kRagged) {
      plan.tables = jin::RaggedTables::Of(ranks, static_cast<uint32_t>(items), 32, &random);
    }
    return plan;
  }
  static bool Reduces(jin::Algorithm algorithm) { return jin::IsAllReduce(algorithm); }
  bool MayBeInPlace() const {
    return Reduces(operation.algorithm) || operation.algorithm == jin::Algorithm::kAllToAll ||
           Permutes();
  }
  bool Permutes() const { return operation.algorithm == jin::Algorithm::kPermute; }
  // The piece that item i is part of.
  size_t PieceOf(size_t i) const { return std::min(i / (items / pieces), pieces - 1); }
  // Its members, as a rank sees them.
  jin::Permutes MembersOf(int rank, const jin::Buffers& buffers) const {
    jin::Permutes members;
    for (size_t k = 0; k < pieces; ++k) {
      jin::AddMember(&members, buffers.buffer[k], sources[k], rank);
    }
    return members;
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
};

uint64_t Identity(int site) { return 0x9E3779B97F4A7C15u * (site + 1); }

bool IsUnsigned(jin::ElementType type) { return !jin::HasKernel(jin::Algorithm::kOneShot, type); }

// Values whose sums every type holds exactly. Unsigned bytes are on both sides of the sign bit.
int Value(const Plan& plan, int rank, int round, int site, size_t i) {
  const auto value = static_cast<int>((rank * 7 + round * 13 + site * 5 + i * 3 + i / 16) % 16) - 7;
  return IsUnsigned(plan.operation.type) ? value + 128 : value;
}

template <class T>
void Append(std::vector<char>* to, T value) {
  const char* at = reinterpret_cast<const char*>(&value);
  to->insert(to->end(), at, at + sizeof(T));
}

void Encode(jin::ElementType type, int value, std::vector<char>* to) {
  const auto real = static_cast<float>(value);
  switch (type) {
    case jin::ElementType::kF32:
      return Append(to, real);
    case jin::ElementType::kBF16:
      return Append(to, static_cast<uint16_t>(std::bit_cast<uint32_t>(real) >> 16));
    case jin::ElementType::kF16:
      return Append(to, static_cast<_Float16>(real));
    case jin::ElementType::kF64:
      return Append(to, static_cast<double>(value));
    case jin::ElementType::kI8:
    case jin::ElementType::kU8:
      return Append(to, static_cast<int8_t>(value));
    case jin::ElementType::kI32:
    case jin::ElementType::kU32:
      return Append(to, int32_t{value});
    case jin::ElementType::kI64:
    case jin::ElementType::kU64:
      return Append(to, int64_t{value});
  }
}

std::vector<char> Input(const Plan& plan, int ranks, int rank, int round, int site) {
  std::vector<char> bytes;
  for (size_t i = 0; i < plan.items * jin::InputShards(plan.operation.algorithm, ranks); ++i) {
    Encode(plan.operation.type, Value(plan, rank, round, site, i), &bytes);
  }
  return bytes;
}

// The sum, maximum or minimum of item i of all ranks.
int Reduced(const Plan& plan, int ranks, int round, int site, size_t i) {
  const jin::Reduction reduction = jin::ReductionOf(plan.operation.algorithm);
  int result = Value(plan, 0, round, site, i);
  for (int r = 1; r < ranks; ++r) {
    const int value = Value(plan, r, round, site, i);
    result = reduction == jin::Reduction::kMax   ? std::max(result, value)
             : reduction == jin::Reduction::kMin ? std::min(result, value)
                                                 : result + value;
  }
  return result;
}

std::vector<char> Expected(const Plan& plan, int ranks, int rank, int round, int site) {
  const auto& [algorithm, type, segments, name] = plan.operation;
  std::vector<char> bytes;
  for (size_t i = 0; i < plan.items * jin::OutputShards(algorithm, ranks); ++i) {
    const size_t first = jin::InputShards(algorithm, ranks) > 1 ? rank * plan.items : 0;
    const size_t at = first + i % plan.items;
    if (algorithm == jin::Algorithm::kRagged) {
      const auto [source, row] = plan.tables.OriginOf(rank, i);
      if (source >= 0) {
        Encode(type, Value(plan, source, round, site, row), &bytes);
      } else {
        bytes.insert(bytes.end(), jin::ItemBytes(type), 'x');
      }
    } else if (plan.Permutes()) {
      const int source = plan.sources[plan.PieceOf(i)][rank];
      Encode(type, source < 0 ? 0 : Value(plan, source, round, site, i), &bytes);
    } else if (jin::OnlyCopies(algorithm)) {
      Encode(type, Value(plan, static_cast<int>(i / plan.items), round, site, at), &bytes);
    } else {
      Encode(type, Reduced(plan, ranks, round, site, at), &bytes);
    }
  }
  return bytes;
}

// Awaits a ticket as a handler that has returned a future.
std::string AwaitByThen(jin::HostGroup& group, jin::Ticket& ticket) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int calls = 0;
    std::string error;
  };
  const auto state = std::make_shared<State>();
  group.KeepMoving();
  ticket.Then([state](const std::string& error) {
    {
      std::lock_guard lock(state->mutex);
      ++state->calls;
      state->error = error;
    }
    state->changed.notify_all();
  });
  std::unique_lock lock(state->mutex);
  if (!state->changed.wait_for(lock, kPatience, [&] { return state->calls > 0; })) {
    Wrong("a wait without end by Then()");
  }
  Require(state->calls == 1, "Then() called back twice");
  return state->error;
}

// Awaits a ticket as a handler that has not returned yet. `moves` moves other groups, too.
std::string AwaitByProgress(
    jin::HostGroup& group, jin::Ticket& ticket, const std::function<void()>& moves = [] {}) {
  const auto start = Clock::now();
  while (!ticket.Done()) {
    if (Clock::now() - start > kPatience) Wrong("a wait without end by Progress()");
    std::this_thread::yield();
    group.Progress();
    moves();
  }
  return ticket.Error();
}

void Sound(int ranks, int processes, int rounds) {
  const jin::Regions regions(ranks, kEpochBufferBytes, 0u - rounds * kSites / 2);
  const auto groups = jin::GroupsOf(regions, processes, kNever);
  // Permutes have regions of their own.
  const jin::Regions of_permutes(ranks, kEpochBufferBytes, 0u - rounds);
  const auto permuting = jin::GroupsOf(of_permutes, processes, kNever);
  std::atomic<long> checked{0};
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  for (int r = 0; r < ranks; ++r) barriers.push_back(std::make_unique<std::barrier<>>(kThreads));
  for (int r = 0; r < ranks; ++r) {
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, r, t] {
        const int process = r * processes / ranks;
        const auto group_of = [&](const Plan& plan) -> jin::HostGroup& {
          return *(plan.Permutes() ? permuting : groups)[process];
        };
        std::mt19937 random(r * 10 + t);
        for (int round = 0; round < rounds; ++round) {
          // Which of the rank's threads arrives at a site: both draw the same number.
          std::mt19937 shared(round * 100 + r);
          std::vector<int> sites;
          for (int s = 0; s < kSites; ++s) {
            if (static_cast<int>(shared() % kThreads) == t) sites.push_back(s);
          }
          std::shuffle(sites.begin(), sites.end(), random);
          std::vector<Plan> plans;
          std::vector<std::vector<char>> inputs, outputs;
          std::vector<std::shared_ptr<jin::Ticket>> tickets;
          for (int s : sites) {
            plans.push_back(Plan::Of(ranks, round, s));
            inputs.push_back(Input(plans.back(), ranks, r, round, s));
            outputs.emplace_back(Expected(plans.back(), ranks, r, round, s).size(), 'x');
          }
          for (size_t k = 0; k < sites.size(); ++k) {
            if (random() % 8 == 0) {
              std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
            }
            const bool in_place = random() % 4 == 0 && plans[k].MayBeInPlace();
            if (in_place) outputs[k] = inputs[k];
            const jin::Buffers buffers =
                plans[k].Cut(in_place ? outputs[k].data() : inputs[k].data(), outputs[k].data());
            const auto arrive = [&](const auto& call) {
              return group_of(plans[k]).Arrive(r, Identity(sites[k]), plans[k].operation, call);
            };
            const bool ragged = plans[k].tables.updates > 0;
            tickets.push_back(
                ragged ? arrive(plans[k].tables.CallOf(r, inputs[k].data(), outputs[k].data(),
                                                       jin::ItemBytes(plans[k].operation.type)))
                : plans[k].Permutes() ? arrive(plans[k].MembersOf(r, buffers))
                : on_mesh             ? arrive(jin::LinkedBuffers{buffers, jin::LinksOf(r, ranks)})
                                      : arrive(buffers));
          }
          for (size_t k = 0; k < sites.size(); ++k) {
            // Peers may wait for this rank in the other group.
            const auto move_all = [&] {
              groups[process]->Progress();
              permuting[process]->Progress();
            };
            jin::HostGroup& group = group_of(plans[k]);
            std::string error;
            if (random() % 2 == 0) {
              groups[process]->KeepMoving();
              permuting[process]->KeepMoving();
              error = AwaitByThen(group, *tickets[k]);
            } else {
              error = AwaitByProgress(group, *tickets[k], move_all);
            }
            const std::string where = "rank " + std::to_string(r) + ", round " +
                                      std::to_string(round) + ", site " + std::to_string(sites[k]);
            Require(error.empty(), where + ": " + error);
            Require(outputs[k] == Expected(plans[k], ranks, r, round, sites[k]),
                    where + ": wrong result");
            ++checked;
          }
          // A device runs one program after the other.
          barriers[r]->arrive_and_wait();
        }
      });
    }
  }
  for (std::thread& t : threads) t.join();
  const uint64_t operations = jin::host_operations;
  for (const auto* of_kind : {&groups, &permuting}) {
    for (const auto& group : *of_kind) Require(group->failure().empty(), group->failure());
  }
  const long expected = static_cast<long>(ranks) * kSites * rounds;
  Require(checked == expected, "checked " + std::to_string(checked));
  Require(operations == static_cast<uint64_t>(expected),
          std::to_string(operations) + " operations counted of " + std::to_string(expected));
  const size_t left = regions.BytesLeft() + of_permutes.BytesLeft();
  Require(left == 0, std::to_string(left) + " bytes left in an epoch buffer");
  printf("sound: ranks %d processes %d rounds %d checked %ld\n", ranks, processes, rounds,
         checked.load());
}

// Whether the bytes are these and the guards are whole.
bool Holds(const jin::Guarded& found, const std::vector<char>& bytes) {
  return found.Hit() == 0 && std::equal(bytes.begin(), bytes.end(), found.data());
}

void Guards(int ranks) {
  const jin::Regions regions(ranks, kEpochBufferBytes);
  const auto groups = jin::GroupsOf(regions, 1, kNever);
  jin::HostGroup& group = *groups.front();
  int calls = 0;
  std::vector<jin::HostGroup::Operation> operations;
  for (const jin::ElementType type : jin::kElementTypes) {
    for (const jin::Algorithm algorithm : jin::kCollectives)
      operations.push_back({algorithm, type});
    for (const jin::Algorithm algorithm : jin::kExtremes) operations.push_back({algorithm, type});
  }
  for (size_t number = 0; number < operations.size(); ++number) {
    jin::HostGroup::Operation& operation = operations[number];
    if (!jin::HasKernel(operation.algorithm, operation.type)) continue;
    const size_t item = jin::ItemBytes(operation.type);
    for (size_t items = 1; items * item <= 70; ++items) {
      if (jin::RunsInSegments(operation.algorithm))
        operation.segments = items % 3 == 0 ? 1 : 2 * (items % 3);
      const Plan plan{operation, items, 1};
      for (size_t shift = 0; shift < 16; ++shift, ++calls) {
        std::vector<jin::Guarded> inputs, outputs;
        std::vector<std::shared_ptr<jin::Ticket>> tickets;
        for (int r = 0; r < ranks; ++r) {
          const std::vector<char> input = Input(plan, ranks, r, calls, 0);
          inputs.emplace_back(input.size(), calls % 2 == 0 ? shift : 0);
          std::copy(input.begin(), input.end(), inputs[r].data());
          outputs.emplace_back(plan.bytes() * jin::OutputShards(operation.algorithm, ranks), shift);
          tickets.push_back(group.Arrive(r, Identity(number), operation,
                                         plan.Cut(inputs[r].data(), outputs[r].data())));
        }
        for (int r = 0; r < ranks; ++r) {
          const std::string error = AwaitByProgress(group, *tickets[r]);
          Require(error.empty() && Holds(inputs[r], Input(plan, ranks, r, calls, 0)) &&
                      Holds(outputs[r], Expected(plan, ranks, r, calls, 0)),
                  std::string(jin::AlgorithmName(operation.algorithm)) + ", type " +
                      std::to_string(static_cast<int>(operation.type)) + ", " +
                      std::to_string(items) + " items, shift " + std::to_string(shift) + ": " +
                      error);
        }
      }
    }
  }
  Require(regions.BytesLeft() == 0,
          std::to_string(regions.BytesLeft()) + " bytes left in an epoch buffer");
}

// A rank's arrival with a buffer that lives as long as the program.
std::shared_ptr<jin::Ticket> ArriveWith(jin::HostGroup& group, int rank, int site) {
  static std::mutex mutex;
  static auto& all = *new std::deque<std::vector<float>>;  // never moves its elements
  float* data;
  {
    std::lock_guard lock(mutex);
    data = all.emplace_back(100, 1.0f).data();
  }
  jin::Buffers buffers;
  buffers.Append({data, data, 400});
  return group.Arrive(rank, Identity(site), {jin::Algorithm::kOneShot, jin::ElementType::kF32},
                      buffers);
}

// Rank 0 and rank 1 permute among themselves, far ahead of rank 2, which reads the log of rank 0's
// process later.
void Behind() {
  constexpr int kRanks = 3, kCalls = 3000;
  const jin::Regions regions(kRanks, kEpochBufferBytes, 0u - kCalls / 2);
  const auto groups = jin::GroupsOf(regions, kRanks, kNever);
  const std::vector<float> in(10, 1.0f);
  std::vector<float> out[kRanks];
  std::vector<std::shared_ptr<jin::Ticket>> tickets[kRanks];
  const auto arrive = [&](int r) {
    out[r].assign(10, -1.0f);
    for (int k = 0; k < kCalls; ++k) {
      jin::Permutes call;
      call.Append({in.data(), out[r].data(), 40}, r == 1 ? 0 : -1, r == 0 ? 1 : -1);
      tickets[r].push_back(groups[r]->Arrive(
          r, Identity(0), {jin::Algorithm::kPermute, jin::ElementType::kF32}, call));
    }
  };
  arrive(0);
  arrive(1);
  for (int k = 0; k < 1000; ++k) {
    for (int r : {0, 1}) {
      const std::string error = AwaitByProgress(*groups[r], *tickets[r][k]);
      Require(error.empty(), error);
    }
  }
  for (int k = 0; k < 10000; ++k) groups[k % 2]->Progress();  // as far ahead as they can
  arrive(2);
  const auto start = Clock::now();
  for (bool done = false; !done;) {
    if (Clock::now() - start > kPatience) Wrong("a rank that is behind does not find its calls");
    done = true;
    for (int r = 0; r < kRanks; ++r) {
      groups[r]->Progress();
      done = done && tickets[r].back()->Done();
    }
  }
  Require(out[0][9] == 0 && out[1][9] == 1 && out[2][9] == 0, "the last result");
  printf("behind: done\n");
}

void RequireText(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    Require(text.find(part) != std::string::npos, "no \"" + std::string(part) + "\" in: " + text);
  }
}

// All that have arrived wait for what is missing.
void Settle(const std::vector<std::shared_ptr<jin::HostGroup>>& groups) {
  for (int k = 0; k < 100; ++k) groups[k % groups.size()]->Progress();
}

// `arriving` ranks arrive at a call of `ranks` in `processes`; the error must name `missing`.
void Deadline(int ranks, int processes, std::vector<int> arriving, int waiter, const char* waiting,
              const char* missing) {
  const jin::Regions regions(ranks, kEpochBufferBytes);
  const auto groups = jin::GroupsOf(regions, processes, kLimit);
  jin::TestMonitor monitor(groups);
  auto group_of = [&](int rank) -> jin::HostGroup& { return *groups[rank * processes / ranks]; };
  // A call at which all ranks arrive works.
  std::vector<std::shared_ptr<jin::Ticket>> first;
  for (int r = 0; r < ranks; ++r) first.push_back(ArriveWith(group_of(r), r, 0));
  for (int r = 0; r < ranks; ++r) {
    const std::string error = AwaitByThen(group_of(r), *first[r]);
    Require(error.empty(), "the first call: " + error);
  }
  std::vector<std::shared_ptr<jin::Ticket>> tickets(ranks);
  for (int r : arriving) tickets[r] = ArriveWith(group_of(r), r, 0);
  Settle(groups);
  monitor.Pass(kLimit / 2);
  for (int r : arriving) Require(!tickets[r]->Done(), "timed out too soon");
  monitor.Pass(kLimit / 2);
  for (int r : arriving) {
    const std::string error = AwaitByThen(group_of(r), *tickets[r]);
    printf("rank %d: %s\n", r, error.c_str());
    RequireText(error, {"psum of 400 bytes timed out", "waited for", "JAX_INTRANODE_TIMEOUT_S"});
    if (r == waiter) RequireText(error, {waiting, missing});
    Require(group_of(r).failure() == error, "failure() is another text");
    // Every later call has the same error, at once.
    const auto later = ArriveWith(group_of(r), r, 1);
    Require(later->Done() && later->Error() == error, "a later call: " + later->Error());
    bool called = false;
    later->Then([&](const std::string& text) { called = text == error; });
    Require(called, "Then() of a complete ticket does not call back at once");
  }
}

// Two processes run an operation in segments. Rank 1 stops in the middle. `end` does something
// then.
template <class End>
std::string AmidSegments(std::chrono::milliseconds timeout, std::chrono::milliseconds pause,
                         End&& end) {
  const jin::Regions regions(2, kEpochBufferBytes);
  const auto groups = jin::GroupsOf(regions, 2, timeout);
  jin::TestMonitor monitor({groups[0]});
  const jin::HostGroup::Operation operation{jin::Algorithm::kTwoShot, jin::ElementType::kF32, 16};
  std::vector<float> data[2] = {std::vector<float>(1000, 1), std::vector<float>(1000, 1)};
  std::vector<std::shared_ptr<jin::Ticket>> tickets;
  // Rank 0 does not move while rank 1 does: together they could come to the end.
  for (int r = 0; r < 2; ++r) {
    const auto hold = monitor.Hold();
    jin::Buffers buffers;
    buffers.Append({data[r].data(), data[r].data(), 4000});
    tickets.push_back(groups[r]->Arrive(r, Identity(0), operation, buffers));
  }
  // Each of these steps ends a segment on rank 0.
  for (int step = 0; step < 5; ++step) {
    {
      const auto hold = monitor.Hold();
      groups[1]->Progress();
    }
    std::this_thread::sleep_for(pause);
    groups[0]->Progress();
    Require(groups[0]->failure().empty(), "a rank that goes on: " + groups[0]->failure());
  }
  Require(!tickets[0]->Done(), "done without its peer");
  groups[0]->KeepMoving();
  end(*groups[0]);
  const std::string error = AwaitByThen(*groups[0], *tickets[0]);
  RequireText(error, {"psum of 4000 bytes", "rank 0 (device 10)", "rank 1 (device 11)"});
  return error;
}

void DeadlineAmidSegments() {
  // All segments together take longer than the time limit.
  const auto timeout = std::chrono::milliseconds(2500);
  RequireText(AmidSegments(timeout, std::chrono::milliseconds(600), [](jin::HostGroup&) {}),
              {"timed out", "whose data has not arrived"});
  RequireText(AmidSegments(kNever, std::chrono::milliseconds(0),
                           [](jin::HostGroup& group) {
                             jin::AbsentDevices absent;
                             absent.Add(11, {jin::PeerState::kLeft, {}, "its process has ended"});
                             group.SetAbsent(absent);
                           }),
              {"its process has ended"});
}

// A rank sends its data, and is lost before the rank that waits looks again.
void LostAfterItsData() {
  const jin::Regions regions(2, kEpochBufferBytes);
  const auto groups = jin::GroupsOf(regions, 2, kNever);
  const auto waiting = ArriveWith(*groups[0], 0, 0);
  ArriveWith(*groups[1], 1, 0);
  jin::AbsentDevices absent;
  absent.Add(11, {jin::PeerState::kLost, {}, "its process has ended"});
  groups[0]->SetAbsent(absent);
  const std::string error = AwaitByThen(*groups[0], *waiting);
  Require(error.empty(), "a call that had all data: " + error);
}

void Deadlines() {
  DeadlineAmidSegments();
  LostAfterItsData();
  // Over processes: the follower, then the leader is missing; then a rank of three.
  Deadline(2, 2, {0}, 0, "rank 0 (device 10)", "waited for rank 1 (device 11)");
  Deadline(2, 2, {1}, 1, "rank 1 (device 11)", "waited for rank 0 (device 10)");
  Deadline(3, 3, {0, 2}, 2, "rank 2 (device 12)", "waited for rank 1 (device 11)");
  // In one process.
  Deadline(2, 1, {1}, 1, "rank 1 (device 11)", "waited for rank 0 (device 10)");
  Deadline(4, 1, {0, 1, 3}, 0, "rank 0 (device 10)", "waited for rank 2 (device 12)");
  // Two ranks a process, one of which is missing in the first or the second.
  Deadline(4, 2, {0, 2, 3}, 0, "rank 0 (device 10)", "waited for rank 1 (device 11)");
  Deadline(4, 2, {0, 1, 3}, 3, "rank 3 (device 13)", "waited for rank 2 (device 12)");
  printf("deadline: done\n");
}

// Two ranks wait in different calls. Both are told so: first by a report, then by an error.
void Mismatch(int processes) {
  const jin::Regions regions(2, kEpochBufferBytes);
  const auto groups = jin::GroupsOf(regions, processes, std::chrono::seconds(60));
  auto group_of = [&](int rank) -> jin::HostGroup& { return *groups[rank * processes / 2]; };
  jin::TestMonitor monitor(groups, std::chrono::seconds(20));
  for (int round = 0; round < 2; ++round) {
    const auto a = ArriveWith(group_of(0), 0, 0), b = ArriveWith(group_of(1), 1, 0);
    Require(AwaitByThen(group_of(0), *a).empty() && AwaitByThen(group_of(1), *b).empty(),
            "a call of both");
  }
  const auto a = ArriveWith(group_of(0), 0, 0), b = ArriveWith(group_of(1), 1, 1);
  Settle(groups);
  monitor.Pass(std::chrono::seconds(60));
  const std::string first = "psum of 400 bytes (first)";
  const std::string second = "psum of 400 bytes (float32[100], train.py:20)";
  const char* const rule = "same operations";
  const std::string of_0 = AwaitByThen(group_of(0), *a);
  RequireText(of_0,
              {(first + " timed out after 60 s: rank 0").c_str(),
               ("rank 1 (device 11), which waits in another operation: " + second).c_str(), rule});
  const std::string of_1 = AwaitByThen(group_of(1), *b);
  if (processes == 2) {
    RequireText(of_1,
                {(second + " timed out after 60 s: rank 1").c_str(),
                 ("rank 0 (device 10), which waits in another operation: " + first).c_str(), rule});
  }
  const auto warnings = monitor.TakeWarnings();
  Require(warnings.size() == static_cast<size_t>(processes),
          std::to_string(warnings.size()) + " reports");
  for (const std::string& warning : warnings) {
    RequireText(warning, {"has waited 20 s", first.c_str(), second.c_str(), "call "});
  }
  std::vector<jin::Failure> failures;
  for (const auto& group : groups) {
    for (const jin::Failure& failure : group->TakeFailures()) failures.push_back(failure);
  }
  Require(failures.size() == static_cast<size_t>(processes), "failures");
  for (const auto& failure : failures) {
    Require(failure.reason == jin::FailureReason::kMismatch && failure.bytes == 400 &&
                failure.missing == 1 - failure.rank &&
                failure.message == (failure.rank == 0 ? of_0 : of_1),
            "the report of a failure");
    Require(failure.site == (failure.rank == 0 ? "first" : "second") &&
                failure.calls == (failure.rank == 0 ? 2 : 0),
            "the call site of a failure");
  }
}

void Mismatches() {
  jin::CallSites::Get().Name(Identity(0), "first");
  jin::CallSites::Get().Name(Identity(1), "second");
  jin::CallSites::Get().Describe("second", "", 0, "float32[100], train.py:20");
  Mismatch(1);
  Mismatch(2);
  {
    // Calls that both ranks make, in another order, are no mismatch: rank 1 is late in the first.
    const jin::Regions regions(2, kEpochBufferBytes);
    const auto groups = jin::GroupsOf(regions, 2, kLimit);
    jin::TestMonitor monitor(groups);
    ArriveWith(*groups[0], 0, 0);
    const auto waiting = ArriveWith(*groups[0], 0, 1);
    ArriveWith(*groups[1], 1, 1);
    Settle(groups);
    monitor.Pass(kLimit);
    const std::string error = AwaitByThen(*groups[0], *waiting);
    RequireText(error, {"timed out", "waited for rank 1 (device 11)"});
    Require(error.find("another operation") == std::string::npos, error);
  }
  printf("mismatch: done\n");
}

void Fails() {
  {
    // A call that waits, and one that comes later.
    const jin::Regions regions(2, kEpochBufferBytes);
    const auto groups = jin::GroupsOf(regions, 2, kNever);
    const auto waiting = ArriveWith(*groups[0], 0, 0);
    Require(!waiting->Done(), "done without its peer");
    groups[0]->KeepMoving();
    groups[0]->Fail("first");
    Require(AwaitByThen(*groups[0], *waiting) == "first", "the waiting call: " + waiting->Error());
    groups[0]->Fail("second");
    Require(groups[0]->failure() == "first", "a later Fail() replaced the first");
    const auto later = ArriveWith(*groups[0], 0, 1);
    Require(later->Done() && later->Error() == "first", "a later call: " + later->Error());
    Require(groups[1]->failure().empty(), "the other process has failed by itself");
  }
  // While ranks arrive: every ticket is completed, by a result or by the error.
  for (int attempt = 0; attempt < 20; ++attempt) {
    const jin::Regions regions(4, kEpochBufferBytes);
    const auto groups = jin::GroupsOf(regions, 2, kNever);
    std::atomic<bool> go{false};
    std::atomic<int> completed{0};
    std::vector<std::thread> threads;
    for (int r = 0; r < 4; ++r) {
      threads.emplace_back([&, r] {
        jin::HostGroup& group = *groups[r / 2];
        std::vector<std::shared_ptr<jin::Ticket>> tickets;
        for (int k = 0; k < 100; ++k) {
          if (k == 20) go = true;
          tickets.push_back(ArriveWith(group, r, k));
        }
        for (auto& ticket : tickets) {
          const std::string error = AwaitByThen(group, *ticket);
          Require(error.empty() || error == "ended", error);
          ++completed;
        }
      });
    }
    std::thread ending([&] {
      while (!go) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::microseconds(attempt * 50));
      for (const auto& group : groups) group->Fail("ended");
    });
    for (std::thread& t : threads) t.join();
    ending.join();
    Require(completed == 400, std::to_string(completed) + " of 400 completed");
  }
  printf("fail: done\n");
}

// A body of a user waits for a rank that does not come, or that the group does not have, and is
// slow to end: its call fails when it has.
void Bodies() {
  for (const int named : {1, 2, 7, -1, INT32_MIN, INT32_MAX}) {
    const jin::Regions regions(2, kEpochBufferBytes);
    const auto groups = jin::GroupsOf(regions, 2, kLimit);
    jin::TestMonitor monitor({groups[0]});
    std::atomic<bool> ended{false};
    const auto body = std::make_shared<jin::HostBody>("shift", [&](jin::v1::HostWait* wait) {
      jin::v1::HostThread thread(wait);
      while (thread.Wait(named)) {
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ended = true;
    });
    const auto ticket = groups[0]->Arrive(0, Identity(0), body);
    groups[0]->KeepMoving();
    while (body->missing() != named) std::this_thread::yield();
    Settle({groups[0]});
    monitor.Pass(kLimit);
    const std::string error = AwaitByThen(*groups[0], *ticket);
    Require(ended, "a call fails before its body has ended");
    const std::string who = named == 1 ? "rank 1 (device 11)" : "an unknown rank";
    const std::string expected =
        "shift timed out after 1000 s: rank 0 (device 10) waited for " + who;
    RequireText(error, {expected.c_str()});
    const auto later =
        groups[0]->Arrive(0, Identity(0), std::make_shared<jin::HostBody>("shift", nullptr));
    Require(later->Error() == error, "a later call: " + later->Error());
  }
  printf("bodies: done\n");
}

// A program with two equal calls is compiled by this thread, and one is loaded, whose calls nobody
// has lowered. Another thread compiles beside them.
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
  printf("sites: done\n");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "sound";
  if (mode == "deadline") {
    Deadlines();
  } else if (mode == "mismatch") {
    Mismatches();
  } else if (mode == "guards") {
    Guards(argc > 2 ? atoi(argv[2]) : 2);
    printf("guards: done\n");
  } else if (mode == "behind") {
    Behind();
  } else if (mode == "fail") {
    Fails();
  } else if (mode == "bodies") {
    Bodies();
  } else if (mode == "sites") {
    Sites();
  } else {
    on_mesh = mode == "mesh";
    Sound(argc > 2 ? atoi(argv[2]) : 4, argc > 3 ? atoi(argv[3]) : 2,
          argc > 4 ? atoi(argv[4]) : 50);
  }
  return 0;
}
