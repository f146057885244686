// Runs calls on a peer buffer (jax_intranode/peer.h) through groups of CPU ranks, without XLA,
// among calls of the library. Several HostGroups stand for processes. Meant for ThreadSanitizer,
// too.
//
//   peer_test sound [ranks] [calls] [patience]
//   peer_test stop
//   peer_test unknown
//   peer_test timer
//
// Each rank has two threads, which arrive at call sites in an order of their own and after random
// times. One makes ring shifts of random distances, with packets of 4, 8 and 16 bytes, the other
// makes plain stores around a barrier; both also make sums. stop: a rank does not come, so the call
// of the others fails, but not before its body has ended. unknown: the same, and the body names a
// rank that does not exist. Exit status 0: everything is right; 1: something is wrong, and a line
// says what. peer_model.cc breaks the protocol.
#include "jax_intranode/include/jax_intranode/peer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/test_monitor.h"
#include "xla_ffi/host/host_group.h"

namespace jin = jax_intranode;
namespace peer = jax_intranode::v1;

namespace {

constexpr size_t kEpochBufferBytes = 64 << 10;
constexpr size_t kDataBytes = 32 << 10;
constexpr int kMostPackets = 200;

std::string variant;
std::chrono::seconds patience{30};
int ranks = 2, calls = 100;
std::mutex wrong_mutex;
long wrong = 0;

void CountWrong() {
  std::lock_guard lock(wrong_mutex);
  ++wrong;
}

// The memory of all ranks, and the groups.
struct World {
  World(int processes, std::chrono::nanoseconds timeout) : regions(ranks, kEpochBufferBytes) {
    buffers.resize(ranks);
    const auto groups = jin::GroupsOf(regions, processes, timeout);
    for (int r = 0; r < ranks; ++r) group_of.push_back(groups[r * processes / ranks]);
  }

  peer::Peers PeersOf(int rank) {
    peer::Peers p{};
    for (int r = 0; r < ranks; ++r) p.memory[r] = buffers[r].bytes;
    p.bytes = kDataBytes;
    p.rank = rank;
    p.size = ranks;
    return p;
  }

  struct alignas(64) Buffer {
    char bytes[peer::kHeaderBytes + kDataBytes] = {};
  };
  const jin::Regions regions;
  std::vector<Buffer> buffers;
  std::vector<std::shared_ptr<jin::HostGroup>> group_of;  // by rank
};

void Pause(std::mt19937& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

uint32_t Value(int call, int rank, size_t i) {
  return i % 5 == 0 ? 0 : call * 1000003u + rank * 1009u + static_cast<uint32_t>(i);
}

template <size_t kWords>
void Shift(peer::HostThread& t, const peer::Peers& p, int call, std::mt19937& random) {
  using T = std::array<uint32_t, kWords>;
  std::mt19937 plan(call);  // the same on all ranks
  const int by = plan() % ranks, count = 1 + plan() % kMostPackets;
  const int to = (p.rank + by) % ranks, from = (p.rank + ranks - by) % ranks;
  const uint32_t epoch = peer::Begin(t, p);
  Pause(random);
  for (int i = 0; i < count; ++i) {
    T value;
    for (size_t k = 0; k < kWords; ++k) value[k] = Value(call, p.rank, i * kWords + k);
    peer::Put(peer::Half(p, to, epoch), i, value);
  }
  Pause(random);
  for (int i = 0; i < count; ++i) {
    T value;
    if (!peer::Take(t, peer::Half(p, p.rank, epoch), i, &value, from)) return;
    for (size_t k = 0; k < kWords; ++k) {
      if (value[k] != Value(call, from, i * kWords + k)) CountWrong();
    }
  }
  peer::End(t, p);
}

// Plain stores, which ThreadSanitizer sees. They lie behind the packets.
void Store(peer::HostThread& t, const peer::Peers& p, int call, std::mt19937& random) {
  const uint32_t epoch = peer::Begin(t, p);
  const auto words = [&](int rank) {
    return reinterpret_cast<uint32_t*>(peer::Half(p, rank, epoch) + kMostPackets * 32);
  };
  for (int r = 0; r < ranks; ++r) words(r)[p.rank] = Value(call, p.rank, r);
  Pause(random);
  if (!peer::Barrier(t, p)) return;
  for (int r = 0; r < ranks; ++r) {
    if (words(p.rank)[r] != Value(call, r, p.rank)) CountWrong();
  }
  peer::End(t, p);
}

// Completed tickets.
class Counter {
 public:
  void Add(const std::string& error) {
    std::lock_guard lock(mutex_);
    ++count_;
    if (!error.empty()) error_ = error;
    changed_.notify_one();
  }
  // Waits for `count` tickets; returns an error, if there was one.
  std::string Await(int count) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [&] { return count_ >= count; })) {
      printf("a wait without end\n");
      fflush(stdout);
      std::_Exit(1);
    }
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
  std::string error_;
};

void RunThread(World& world, int rank, int thread, Counter& counter) {
  std::mt19937 random(rank * 2 + thread);
  const auto& group = world.group_of[rank];
  std::vector<std::array<float, 8>> in(calls), out(calls);
  for (int call = thread; call < calls; call += 2) {
    Pause(random);
    std::shared_ptr<jin::Ticket> ticket;
    if (call % 6 >= 4) {
      for (int k = 0; k < 8; ++k) in[call][k] = static_cast<float>(call + rank + k);
      jin::Buffers buffers;
      buffers.Append({in[call].data(), out[call].data(), sizeof in[call]});
      ticket =
          group->Arrive(rank, call, {jin::Algorithm::kOneShot, jin::ElementType::kF32}, buffers);
    } else {
      ticket = group->Arrive(
          rank, call,
          std::make_shared<jin::HostBody>(
              "call", [peers = world.PeersOf(rank), call, rank](peer::HostWait* wait) {
                peer::HostThread t(wait);
                std::mt19937 random(call * 100 + rank);
                switch (call % 6) {
                  case 0:
                    return Shift<1>(t, peers, call, random);
                  case 1:
                    return Store(t, peers, call, random);
                  case 2:
                    return Shift<4>(t, peers, call, random);
                  default:
                    return Shift<2>(t, peers, call, random);
                }
              }));
    }
    if (!ticket->Done()) group->KeepMoving();
    ticket->Then([&counter](const std::string& error) { counter.Add(error); });
  }
  counter.Await(ranks * calls);  // the buffers must stay
  for (int call = thread; call < calls; call += 2) {
    for (int k = 0; call % 6 >= 4 && k < 8; ++k) {
      float sum = 0;
      for (int r = 0; r < ranks; ++r) sum += static_cast<float>(call + r + k);
      if (out[call][k] != sum) CountWrong();
    }
  }
}

int RunCalls(int processes) {
  World world(processes, patience * 2);
  Counter counter;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, r, t] { RunThread(world, r, t, counter); });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < ranks; ++r) {
    const char* data = world.buffers[r].bytes + peer::kHeaderBytes;
    const size_t packets = kMostPackets * 32;
    for (size_t half = 0; half < 2; ++half) {
      for (size_t i = 0; i < packets; ++i) wrong += data[half * kDataBytes / 2 + i] != 0;
    }
  }
  printf("%s: ranks %d calls %d wrong %ld\n", variant.c_str(), ranks, calls, wrong);
  return wrong != 0;
}

// Rank 1 is in another process and does not come. Rank 0's body waits for it, and is slow to end.
int RunStop() {
  World world(2, std::chrono::milliseconds(100));
  const jin::TestMonitor monitor({world.group_of[0]});
  Counter counter;
  std::atomic<bool> ended{false};
  const auto ticket = world.group_of[0]->Arrive(
      0, 1,
      std::make_shared<jin::HostBody>(
          "shift", [&ended, peers = world.PeersOf(0)](peer::HostWait* wait) {
            peer::HostThread t(wait);
            std::mt19937 random(0);
            Shift<1>(t, peers, 1, random);  // call 1 shifts by more than 0
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            ended = true;
          }));
  world.group_of[0]->KeepMoving();
  ticket->Then([&](const std::string& error) {
    if (!ended) CountWrong();
    counter.Add(error);
  });
  const std::string error = counter.Await(1);
  const std::string expected = "shift timed out after 0.1 s: rank 0 (device 10) waited for rank 1";
  if (error.find(expected) == std::string::npos) {
    printf("wrong error: %s\n", error.c_str());
    return 1;
  }
  if (world.group_of[0]->Arrive(0, 1, std::make_shared<jin::HostBody>("shift", nullptr))->Error() !=
      error) {
    CountWrong();
  }
  printf("stop: wrong %ld\n", wrong);
  return wrong != 0;
}

// Rank 1 does not come, and rank 0's body says that it waits for a rank that the group does not
// have.
int RunUnknown() {
  for (const int named : {2, 7, -1, INT32_MIN, INT32_MAX}) {
    World world(2, std::chrono::milliseconds(300));
    jin::TestMonitor monitor({world.group_of[0]}, std::chrono::milliseconds(100));
    Counter counter;
    const auto ticket = world.group_of[0]->Arrive(
        0, 1, std::make_shared<jin::HostBody>("shift", [named](peer::HostWait* wait) {
          peer::HostThread t(wait);
          while (t.Wait(named)) {
          }
        }));
    world.group_of[0]->KeepMoving();
    ticket->Then([&](const std::string& error) { counter.Add(error); });
    const std::string error = counter.Await(1);
    const std::vector<std::string> warnings = monitor.TakeWarnings();
    const std::string who = "an unknown rank, whose data has not arrived";
    if (error.find("rank 0 (device 10) waited for " + who) == std::string::npos ||
        warnings.empty() || warnings[0].find("waits for " + who) == std::string::npos) {
      printf("wrong error: %s\n", error.c_str());
      return 1;
    }
  }
  printf("unknown: wrong 0\n");
  return 0;
}

// A wait on a GPU, polled every microsecond: nanoseconds that the timer has seen when it ends.
uint64_t TimedWait(peer::WaitTimer& timer, uint64_t* now, uint64_t polls) {
  uint64_t waited = 0;
  for (uint64_t i = 0; i < polls; ++i, *now += 1000) {
    if (timer.Poll()) waited = timer.Waited(*now);
  }
  return waited;
}

// A body of an hour with a short wait every 10 ms, and one long wait, which alone is long.
int RunTimer() {
  peer::WaitTimer timer;
  uint64_t now = 1, longest = 0;
  for (int i = 0; i < 360'000; ++i, now += 10'000'000) {
    longest = std::max(longest, TimedWait(timer, &now, 1500));
    timer.End();
  }
  if (longest > 2'000'000) CountWrong();
  if (TimedWait(timer, &now, 5'000'000) < 4'900'000'000) CountWrong();
  printf("timer: wrong %ld\n", wrong);
  return wrong != 0;
}

}  // namespace

int main(int argc, char** argv) {
  variant = argc > 1 ? argv[1] : "sound";
  if (argc > 2) ranks = atoi(argv[2]);
  if (argc > 3) calls = atoi(argv[3]);
  if (argc > 4) patience = std::chrono::seconds(atoi(argv[4]));
  if (variant == "stop") return RunStop();
  if (variant == "unknown") return RunUnknown();
  if (variant == "timer") return RunTimer();
  if (variant != "sound") {
    printf("unknown variant\n");
    return 2;
  }
  return RunCalls(ranks > 2 ? 2 : ranks);
}
