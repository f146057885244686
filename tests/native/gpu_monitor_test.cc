// The monitor and the groups of GPUs (ffi/platform_cuda.h), with CUDA in fakes: who frees memory
// while the monitor looks at it, which groups a failure ends, and what a kernel may write into its
// record. Exit status 0: all of it is as it should be.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>

#include "xla_ffi/ffi/collectives_cuda.h"
#include "xla_ffi/ffi/platform_cuda.h"
#include "xla_ffi/health/monitor.h"

using namespace jax_intranode;

namespace jax_intranode {
std::atomic<uint64_t> device_handler_calls{0};
}

namespace {

#define CHECK(condition)                      \
  if (!(condition)) {                         \
    printf("%d: %s\n", __LINE__, #condition); \
    fflush(stdout);                           \
    return 1;                                 \
  }                                           \
  static_assert(true)

CudaPlatform& platform = CudaPlatform::Get();
std::atomic<bool> in_monitor_freed{false};
thread_local bool is_monitor = false;

// Memory as a slab owns it: nothing may use it once it is freed, and freeing it may wait for
// kernels that end only when the monitor tells them to. So it is freed without a lock of the
// monitor's, and not in its thread.
struct Page {
  void* const at = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ~Page() {
    if (is_monitor) in_monitor_freed = true;
    platform.Apply();
    munmap(at, 4096);
  }
};

// The groups of a partition, of which this process has the first device of each.
std::shared_ptr<DeviceCommunicator> Make(const Partition& partition,
                                         const std::vector<FailureRecord*>& records) {
  auto communicator = std::make_shared<DeviceCommunicator>();
  for (size_t g = 0; g < records.size(); ++g) {
    DeviceGroup group{};
    group.size = static_cast<int>(partition.size);
    group.failure = records[g];
    group.timeout_ns = 1'000'000'000'000;
    const auto device = static_cast<int32_t>(g);
    communicator->members[device] = {group, DeviceIdsOf(partition, device)};
  }
  return communicator;
}
std::shared_ptr<DeviceCommunicator> Add(const Partition& partition,
                                        std::shared_ptr<DeviceCommunicator> communicator) {
  platform.AddNew([&] { return Registry<DeviceCommunicator>::Get().Add(partition, communicator); });
  return communicator;
}
std::shared_ptr<DevicePeerBuffer> AddBuffer(std::shared_ptr<DeviceCommunicator> communicator,
                                            const Partition& partition, v1::PeerRecord* record) {
  auto buffer = std::make_shared<DevicePeerBuffer>();
  buffer->name = "mine";
  buffer->partition = partition;
  buffer->communicator = std::move(communicator);
  v1::Peers peers{};
  peers.size = static_cast<int32_t>(partition.size);
  peers.record = record;
  peers.timeout_ns = 1'000'000'000'000;
  buffer->members[0] = peers;
  platform.AddNew([&] { return DevicePeerBuffers::Get().Add("mine", buffer); });
  return buffer;
}
void Clear() {
  Registry<DeviceCommunicator>::Get().Clear();
  DevicePeerBuffers::Get().Clear();
}

// Communicators and peer buffers go, as after shutdown() and close(), while the monitor looks. A
// buffer's page of records goes with it.
int MemoryIsFreedByOthers(int rounds) {
  std::atomic<bool> stop{false};
  std::thread monitor([&] {
    is_monitor = true;
    while (!stop) {
      platform.Look(Clock::now(), {});
      platform.TakeFailures();
    }
  });
  const Partition partition{{0, 1}, 2};
  for (int i = 0; i < rounds; ++i) {
    auto page = std::make_shared<Page>(), of_buffer = std::make_shared<Page>();
    auto communicator = Make(partition, {new (page->at) FailureRecord{}});
    communicator->memory = std::move(page);
    communicator = Add(partition, std::move(communicator));
    auto buffer =
        AddBuffer(std::move(communicator), partition, new (of_buffer->at) v1::PeerRecord{});
    buffer->memory = std::move(of_buffer);
    // A program may hold the buffer when both have been closed.
    if (i % 2 == 0) buffer.reset();
    Clear();
  }
  stop = true;
  monitor.join();
  CHECK(!in_monitor_freed);
  return 0;
}

AbsentDevices Absent(int64_t device, PeerState state) {
  AbsentDevices absent;
  absent.Add(device, {state, Clock::now(), std::to_string(device) + " is absent"});
  return absent;
}

bool Waits(const std::function<bool()>& condition) {
  for (int i = 0; i < 6000 && !condition(); ++i) usleep(10'000);
  return condition();
}

// Device 12 has called shutdown(), and a call of {10, 11, 12} is refused: {10, 11} goes on.
int ARefusedCallFailsAlone() {
  FailureRecord records[2] = {};
  const auto all = Add({{10, 11, 12}, 3}, Make({{10, 11, 12}, 3}, {&records[0]}));
  const auto pair = Add({{10, 11}, 2}, Make({{10, 11}, 2}, {&records[1]}));
  platform.SetAbsent(Absent(12, PeerState::kLeft));
  const std::string why = all->Refuse(0);
  CHECK(why.find("12 is absent") != why.npos);
  std::vector<Failure> told;
  CHECK(Waits([&] {
    for (Failure& failure : Monitor::Get().TakeFailures()) told.push_back(std::move(failure));
    return !told.empty();
  }));
  CHECK(told.size() == 1 && told[0].message == why && told[0].device_ids.size() == 3);
  platform.Look(Clock::now(), {});
  CHECK(records[0].abort == 1 && records[1].abort == 0 && pair->Refuse(0).empty());
  platform.SetAbsent({});
  Clear();
  return 0;
}

// One group of a partition loses a process: the other one goes on.
int AGroupFailsAlone() {
  FailureRecord records[2] = {};
  const Partition partition{{10, 11, 20, 21}, 2};
  const auto both = Add(partition, Make(partition, {&records[0], &records[1]}));
  for (const PeerState state : {PeerState::kLeft, PeerState::kLost}) {
    platform.SetAbsent(Absent(11, state));
    CHECK(records[0].abort == 1 && both->Refuse(0).find("11 is absent") != std::string::npos);
    CHECK(records[1].abort == 0 && both->Refuse(1).empty());
  }
  for (const Failure& failure : platform.TakeFailures()) CHECK(failure.device_ids[0] == 10);
  platform.SetAbsent({});
  Clear();
  return 0;
}

// The kernel of a user on device 10 has named a rank that its group does not have, and has given
// up: the message names no rank. All groups that device 10 is in end, and no other.
int AKernelFailureEndsItsDevice(int named) {
  FailureRecord records[3] = {};
  v1::PeerRecord of_buffer{};
  const Partition pairs{{10, 11, 20, 21}, 2}, all{{10, 11, 20, 21}, 4};
  const auto in_pairs = Add(pairs, Make(pairs, {&records[0], &records[1]}));
  const auto in_all = Add(all, Make(all, {&records[2]}));
  const auto buffer = AddBuffer(in_pairs, pairs, &of_buffer);
  CHECK(Monitor::Get().TakeFailures().empty());  // another record was here before
  // It has waited before, and told so.
  of_buffer.wait = static_cast<uint64_t>(named & 0xFF) << 32 | uint64_t{2000} << 40;
  const auto waits = platform.Look(Clock::now(), {});
  const bool is_rank = named == 1;
  const int in_byte = (named & 0xFF) < 2 ? named & 0xFF : -1;
  CHECK(waits.size() == 1 && waits[0].missing == in_byte);
  of_buffer.missing = named;
  static_cast<volatile uint32_t&>(of_buffer.reason) = v1::kTimedOut;
  std::string told;
  CHECK(Waits([&] {
    for (const Failure& failure : Monitor::Get().TakeFailures()) told = failure.message;
    return !told.empty();
  }));
  const std::string who = is_rank ? "rank 1 (device 11)." : "an unknown rank.";
  CHECK(told.find("rank 0 (device 10) waited for " + who) != told.npos);
  CHECK(Waits([&] { return in_all->Refuse(0) == told; }));
  CHECK(in_pairs->Refuse(0) == told && of_buffer.abort == 1 && records[0].abort == 1);
  CHECK(records[2].abort == 1 && records[1].abort == 0 && in_pairs->Refuse(1).empty());
  Clear();
  return 0;
}

// A wait in a kernel, polled every microsecond: nanoseconds that the timer has seen when it ends.
uint64_t TimedWait(v1::WaitTimer& timer, uint64_t* now, uint64_t polls) {
  uint64_t waited = 0;
  for (uint64_t i = 0; i < polls; ++i, *now += 1000) {
    if (timer.Poll()) waited = timer.Waited(*now);
  }
  return waited;
}

// A body of six minutes with a short wait every 10 ms, and one long wait, which alone is long.
int ManyShortWaitsAreNotLong() {
  v1::WaitTimer timer;
  uint64_t now = 1, longest = 0;
  for (int i = 0; i < 36'000; ++i, now += 10'000'000) {
    longest = std::max(longest, TimedWait(timer, &now, 1500));
    timer.End();
  }
  CHECK(longest <= 2'000'000);
  CHECK(TimedWait(timer, &now, 5'000'000) >= 4'900'000'000);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (ManyShortWaitsAreNotLong() != 0) return 1;
  if (MemoryIsFreedByOthers(argc > 1 ? atoi(argv[1]) : 20000) != 0) return 1;
  if (AGroupFailsAlone() != 0) return 1;  // it takes the failures that the monitor would take
  Monitor::Get().Add(&platform, 10);
  if (ARefusedCallFailsAlone() != 0) return 1;
  for (const int named : {1, 2, 7, -1, 1 << 30}) {
    if (AKernelFailureEndsItsDevice(named) != 0) return 1;
  }
  printf("done\n");
  fflush(stdout);
  _exit(0);  // the monitor's thread goes on
}
