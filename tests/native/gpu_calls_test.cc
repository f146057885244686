// Calls and failures on GPUs, with CUDA and XLA's runtime in fakes: the handlers of collectives
// (ffi/collectives_cuda.h), and the monitor and the groups (ffi/platform_cuda.h).
//
//   gpu_calls_test ROUNDS
//
// When a launch fails, no later call may take what the peers have sent for this one: it is refused,
// what waits is told to end, and what is replayed finds its region closed. Then: what absent peers
// mean, peers that run another operation, which groups a failure ends, what a kernel may write into
// its record, and, in so many rounds, who frees memory while the monitor looks at it. Exit status
// 0: all of it is as it should be.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/fake_xla.h"
#include "xla_ffi/ffi/collectives_cuda.h"
#include "xla_ffi/ffi/platform_cuda.h"
#include "xla_ffi/health/call_sites.h"
#include "xla_ffi/health/monitor.h"

// CUDA, and what launches kernels.
namespace {

cudaError_t launch_status, memset_status;
int launches = 0;
uint64_t permutations_of_call = 0;
bool capturing = false;  // the call's stream: what is enqueued there is dropped with the graph

bool IsCaptured(cudaStream_t stream) {
  return capturing && reinterpret_cast<uintptr_t>(stream) == stream_of_call;
}

}  // namespace

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = IsCaptured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (memset_status == cudaSuccess && !IsCaptured(stream)) memset(to, value, bytes);
  return memset_status;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "out of resources"; }

namespace jax_intranode {

cudaStream_t ClosingStreamOf(int) { return reinterpret_cast<cudaStream_t>(99); }
bool NormFits(ElementType, const NormCall&, LaunchShape) { return true; }

#define LAUNCH(Call)                                                                    \
  cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup&, const Call&, \
                     cudaStream_t) {                                                    \
    ++launches;                                                                         \
    permutations_of_call = operation.permutations;                                      \
    return launch_status;                                                               \
  }
LAUNCH(Buffers)
LAUNCH(LinkedBuffers)
LAUNCH(NormCall)
LAUNCH(Permutes)
LAUNCH(ExpertsCall)
LAUNCH(RoutedCall)
LAUNCH(RaggedCall)

}  // namespace jax_intranode

namespace {

using namespace jax_intranode;
using namespace std::chrono_literals;
using enum PeerState;

void Check(bool condition, int line, const char* text) {
  if (condition) return;
  printf("%d: %s\n", line, text);
  fflush(stdout);
  _exit(1);
}
#define CHECK(condition) Check(condition, __LINE__, #condition)

bool Has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

CudaPlatform& platform = CudaPlatform::Get();
std::atomic<bool> in_monitor_freed{false};
thread_local bool is_monitor = false;

constexpr int64_t kTimeoutNs = 1'000'000'000'000;

// The groups of a partition, of which this process has the first device of each.
std::shared_ptr<DeviceCommunicator> Make(const Partition& partition,
                                         const std::vector<FailureRecord*>& records) {
  auto communicator = std::make_shared<DeviceCommunicator>();
  for (size_t g = 0; g < records.size(); ++g) {
    DeviceGroup group{};
    group.size = static_cast<int>(partition.size);
    group.failure = records[g];
    group.timeout_ns = kTimeoutNs;
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
  peers.timeout_ns = kTimeoutNs;
  buffer->members[0] = peers;
  platform.AddNew([&] { return DevicePeerBuffers::Get().Add("mine", buffer); });
  return buffer;
}
void Clear() {
  platform.SetAbsent({});
  Registry<DeviceCommunicator>::Get().Clear();
  DevicePeerBuffers::Get().Clear();
}

// How the call that fails is enqueued: eagerly; captured by XLA, which drops the graph; or so that
// its region can't be closed, which the error says.
enum class How { kEager, kCaptured, kUnclosed };

void FailedLaunch(How how) {
  constexpr size_t kBuffer = 64 << 10;
  struct Memory {
    std::vector<uint64_t> regions[2];
    FailureRecord records[2] = {};
  };
  auto memory = std::make_shared<Memory>();
  auto communicator = std::make_shared<DeviceCommunicator>();
  communicator->memory = memory;  // XLA keeps what the handlers know of a program
  auto& [regions, records] = *memory;
  for (auto& region : regions) region.resize((kHeaderBytes + 2 * kBuffer) / 8);
  for (int device : {0, 1}) {
    DeviceGroup group{};
    for (int r : {0, 1}) group.region[r] = reinterpret_cast<char*>(regions[r].data());
    group.epoch_buffer_bytes = kBuffer;
    group.rank = device;
    group.size = 2;
    group.failure = &records[device];
    communicator->members[device] = {group, {0, 1}};
  }
  Registry<DeviceCommunicator>::Get().Add({{0, 1}, 2}, communicator);
  Registry<DeviceCommunicator>::Get().Add({{0, 1}, 2, true}, communicator);

  Frame frame;
  int64_t ids[] = {0, 1}, size = 2, sources[2];
  int32_t algorithm = static_cast<int32_t>(Algorithm::kPermute), one = 1, threads = 32;
  XLA_FFI_Array array{XLA_FFI_DataType_S64, 2, ids}, of_ranks{XLA_FFI_DataType_S64, 2, sources};
  XLA_FFI_Scalar of_size{XLA_FFI_DataType_S64, &size}, of_one{XLA_FFI_DataType_S32, &one},
      of_threads{XLA_FFI_DataType_S32, &threads}, of_algorithm{XLA_FFI_DataType_S32, &algorithm};
  XLA_FFI_ByteSpan site{"psum", 4};
  frame.attributes = {{"device_ids", {XLA_FFI_AttrType_ARRAY, &array}},
                      {"group_size", {XLA_FFI_AttrType_SCALAR, &of_size}},
                      {"algorithm", {XLA_FFI_AttrType_SCALAR, &of_algorithm}},
                      {"segments", {XLA_FFI_AttrType_SCALAR, &of_one}},
                      {"blocks", {XLA_FFI_AttrType_SCALAR, &of_one}},
                      {"threads", {XLA_FFI_AttrType_SCALAR, &of_threads}},
                      {"site", {XLA_FFI_AttrType_STRING, &site}},
                      {"sources", {XLA_FFI_AttrType_ARRAY, &of_ranks}}};
  float numbers[4] = {};
  int64_t dims[] = {4};
  XLA_FFI_Buffer x{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, numbers, 1, dims};
  const auto instantiate = [&] {
    return frame.Run(&CudaCollectiveInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
  };
  const auto call = [&] {
    return frame.Run(&CudaCollective, XLA_FFI_ExecutionStage_EXECUTE, {x}, {x});
  };

  // Permutes that differ in their permutations alone are different operations.
  const auto permuted = [&](int64_t of_0, int64_t of_1) {
    sources[0] = of_0;
    sources[1] = of_1;
    CHECK(instantiate().empty() && call().empty());
    return permutations_of_call;
  };
  const uint64_t swap = permuted(1, 0), to_1 = permuted(-1, 0), to_0 = permuted(1, -1);
  CHECK(swap != 0 && swap != to_1 && swap != to_0 && to_0 != to_1 && permuted(1, 0) == swap);

  algorithm = static_cast<int32_t>(Algorithm::kOneShot);
  frame.attributes.erase("sources");
  CHECK(instantiate().empty());
  launches = 0;
  CHECK(call().empty() && launches == 1);
  CHECK(records[0].abort == 0 && communicator->members[0].group.Header()->closed == 0);

  launch_status = cudaSuccess + 1;
  capturing = how == How::kCaptured;
  if (how == How::kUnclosed) memset_status = cudaSuccess + 1;
  const std::string failed = call();
  CHECK(Has(failed, "launching psum on CUDA device 0 failed: out of resources"));
  CHECK(Has(failed, "memory can't be closed") == (how == How::kUnclosed));
  launch_status = cudaSuccess;
  CHECK(call() == failed && launches == 2);               // refused
  CHECK(records[0].abort == 1 && records[1].abort == 1);  // what waits ends
  // What is replayed gives up.
  CHECK((communicator->members[0].group.Header()->closed != 0) == (how != How::kUnclosed));
  CHECK(communicator->members[1].group.Header()->closed == 0);  // where calls are refused, too
  memset_status = cudaSuccess;
  capturing = false;
  Clear();
}

// A kernel has refused an update of a ragged all-to-all: what the user reads.
void BadUpdate() {
  FailureRecord record = {};
  const Partition partition{{10, 11}, 2};
  const auto communicator = Add(partition, Make(partition, {&record}));
  record.algorithm = static_cast<uint32_t>(Algorithm::kRagged);
  record.missing = -1;
  record.fault = {0, 1, 3, 5, -1, 7, 4, 8, 9};
  record.reason = static_cast<uint32_t>(FailureReason::kBadUpdate);
  CHECK(Has(TextOf(platform.TakeFailures().at(0)),
            "ragged_all_to_all failed: update 3 from rank 0 to rank 1 has 5 rows"));
  Clear();
}

// What absent peers mean for calls, by the table in health/peer_table.h.
void AbsentPeers() {
  const Clock::time_point start = Clock::now();
  const Partition partition{{10, 11, 12}, 3};
  FailureRecord record{};
  std::shared_ptr<DeviceCommunicator> communicator;
  // A new communicator of the devices 10, 11 and 12.
  const auto renew = [&] {
    record = {};
    communicator = Add(partition, Make(partition, {&record}));
  };
  const auto tell = [&](PeerState of_11, PeerState of_12) {
    AbsentDevices absent;
    absent.Add(11, {of_11, start, "11"});
    absent.Add(12, {kRunning, start, "12"});
    absent.Add(12, {of_12, start, "12"});
    absent.Add(12, {kRunning, start, "12"});  // of what several meshes know, the worst counts
    platform.SetAbsent(absent);
  };
  // The kernel has waited for this rank for so many seconds; another word each time. Then the
  // monitor looks.
  const auto wait = [&](int missing, int seconds, int at) {
    record.wait = uint64_t{1} | static_cast<uint64_t>(missing) << 32 |
                  static_cast<uint64_t>(seconds) * 100 << 40;
    return platform.Look(start + std::chrono::seconds(at), {});
  };

  renew();
  CHECK(platform.Look(start, {}).empty());
  const auto waits = wait(1, 20, 20);
  CHECK(waits.size() == 1 && waits[0].missing == 1 && waits[0].waited == 20s);
  CHECK(!waits[0].give_up && waits[0].reported && record.abort == 0);
  // Nobody has written for a second: it is over.
  CHECK(platform.Look(start + 22s, {}).empty());
  // A late peer is waited for, whoever else has finished.
  tell(kRunning, kFinished);
  CHECK(record.abort == 0 && communicator->Refuse(0).empty());
  wait(1, 30, 30);
  CHECK(record.abort == 0);
  // One that has finished, too, but only for a while.
  wait(2, 2, 31);
  CHECK(record.abort == 0);
  // It takes that back.
  tell(kRunning, kRunning);
  wait(2, 20, 32);
  CHECK(record.abort == 0);
  tell(kRunning, kSilent);
  wait(2, 21, 33);
  CHECK(record.abort == 1 && Has(communicator->Refuse(0), ": 12. Restart"));
  // What has given up does not go on when the peer returns.
  tell(kRunning, kRunning);
  CHECK(record.abort == 1);

  renew();
  tell(kLeft, kSilent);
  CHECK(record.abort == 1 && Has(communicator->Refuse(0), ": 11. Restart"));
  CHECK(Has(platform.TakeFailures().at(0).message, ": 11. Restart"));
  tell(kLeft, kRunning);
  CHECK(record.abort == 1);
  tell(kRunning, kRunning);
  renew();
  CHECK(record.abort == 0);
  tell(kRunning, kLost);
  CHECK(record.abort == 1 && !communicator->failure(0).empty());
  // A communicator that is new knows of the absence, and fails.
  renew();
  CHECK(record.abort == 1 && !communicator->failure(0).empty());
  // The record of a kernel that was told to give up says why.
  record.missing = 2;
  record.reason = static_cast<uint32_t>(FailureReason::kAborted);
  const auto failures = platform.TakeFailures();
  CHECK(failures.size() == 1 && failures[0].reason == FailureReason::kPeerGone &&
        failures[0].detail == ", but 12" && failures[0].device_ids.size() == 3);
  CHECK(platform.TakeFailures().empty());
  Clear();
}

// Kernels of matmuls wait for other things than packets, and compare while they wait.
void OtherOperations() {
  struct Waiting {
    int met = -1;
    uint64_t other = 0;
    void MeetsOther(int peer, uint64_t word) { met = peer, other = word; }
  };
  std::vector<uint64_t> regions[2];
  DeviceGroup groups[2] = {};
  for (int rank : {0, 1}) {
    regions[rank].resize(kHeaderBytes / 8);
    for (DeviceGroup& group : groups) {
      group.region[rank] = reinterpret_cast<char*>(regions[rank].data());
    }
    groups[rank].rank = rank;
    groups[rank].size = 2;
    groups[rank].operation = OperationWordOfDigest(Algorithm::kAllGatherMatmul, 7);
  }
  const auto met = [&] {
    Waiting waiting;
    CompareOperations(waiting, groups[0]);
    return std::make_pair(waiting.met, ToldOperation(waiting.other));
  };
  CHECK(met().first == -1);  // rank 1 has told nothing
  TellOperation(groups[1], 0, 0);
  CHECK(met().first == -1);
  groups[1].operation = OperationWordOfDigest(Algorithm::kMatmulReduceScatter, 7);
  TellOperation(groups[1], 0, 1);
  CHECK(met().first == -1);  // that is the next one
  TellOperation(groups[1], 0, 0);
  CHECK(met() == std::make_pair(1, std::string("matmul_reduce_scatter of other shapes")));
}

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

// Communicators and peer buffers go, as after shutdown() and close(), while the monitor looks. A
// buffer's page of records goes with it.
void MemoryIsFreedByOthers(int rounds) {
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
    // A program may hold the buffer when both have been closed, and others may take their places.
    if (i % 3 == 0) buffer.reset();
    if (i % 3 != 2) Clear();
  }
  stop = true;
  monitor.join();
  CHECK(!in_monitor_freed);
}

AbsentDevices Absent(int64_t device, PeerState state) {
  AbsentDevices absent;
  absent.Add(device, {state, Clock::now(), std::to_string(device) + " is absent"});
  return absent;
}

template <class Condition>
void Await(int line, const Condition& condition) {
  for (int i = 0; i < 6000 && !condition(); ++i) usleep(10'000);
  Check(condition(), line, "awaited");
}

// The first failure that the monitor's thread finds.
Failure NextFailure(int line) {
  std::vector<Failure> told;
  Await(line, [&] {
    if (told.empty()) told = Monitor::Get().TakeFailures();
    return !told.empty();
  });
  Check(told.size() == 1, line, "one failure");
  return told[0];
}

// Device 12 has called shutdown(), and a call of {10, 11, 12} is refused: {10, 11} goes on.
void ARefusedCallFailsAlone() {
  FailureRecord records[2] = {};
  const auto all = Add({{10, 11, 12}, 3}, Make({{10, 11, 12}, 3}, {&records[0]}));
  const auto pair = Add({{10, 11}, 2}, Make({{10, 11}, 2}, {&records[1]}));
  platform.SetAbsent(Absent(12, kLeft));
  const std::string why = all->Refuse(0);
  CHECK(Has(why, "12 is absent"));
  const Failure told = NextFailure(__LINE__);
  CHECK(told.message == why && told.device_ids.size() == 3);
  platform.Look(Clock::now(), {});
  CHECK(records[0].abort == 1 && records[1].abort == 0 && pair->Refuse(0).empty());
  Clear();
}

// One group of a partition loses a process: the other one goes on.
void AGroupFailsAlone() {
  FailureRecord records[2] = {};
  const Partition partition{{10, 11, 20, 21}, 2};
  const auto both = Add(partition, Make(partition, {&records[0], &records[1]}));
  for (const PeerState state : {kLeft, kLost}) {
    platform.SetAbsent(Absent(11, state));
    CHECK(records[0].abort == 1 && Has(both->Refuse(0), "11 is absent"));
    CHECK(records[1].abort == 0 && both->Refuse(1).empty());
  }
  for (const Failure& failure : platform.TakeFailures()) CHECK(failure.device_ids[0] == 10);
  Clear();
}

// The kernel of a user on device 10 has named a rank that its group does not have, and has given
// up: the message names no rank. All groups that device 10 is in end, and no other.
void AKernelFailureEndsItsDevice(int named) {
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
  CHECK(waits.size() == 1 && waits[0].missing == ((named & 0xFF) < 2 ? named & 0xFF : -1));
  of_buffer.missing = named;
  static_cast<volatile uint32_t&>(of_buffer.reason) = v1::kTimedOut;
  const std::string told = NextFailure(__LINE__).message;
  const std::string who = named == 1 ? "rank 1 (device 11)." : "an unknown rank.";
  CHECK(Has(told, "rank 0 (device 10) waited for " + who));
  Await(__LINE__, [&] { return in_all->Refuse(0) == told; });
  CHECK(in_pairs->Refuse(0) == told && of_buffer.abort == 1 && records[0].abort == 1);
  CHECK(records[2].abort == 1 && records[1].abort == 0 && in_pairs->Refuse(1).empty());
  Clear();
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
void ManyShortWaitsAreNotLong() {
  v1::WaitTimer timer;
  uint64_t now = 1, longest = 0;
  for (int i = 0; i < 36'000; ++i, now += 10'000'000) {
    longest = std::max(longest, TimedWait(timer, &now, 1500));
    timer.End();
  }
  CHECK(longest <= 2'000'000);
  CHECK(TimedWait(timer, &now, 5'000'000) >= 4'900'000'000);
}

}  // namespace

int main(int argc, char** argv) {
  for (const How how : {How::kEager, How::kCaptured, How::kUnclosed}) FailedLaunch(how);
  BadUpdate();
  AbsentPeers();
  OtherOperations();
  AGroupFailsAlone();
  ManyShortWaitsAreNotLong();
  MemoryIsFreedByOthers(argc > 1 ? atoi(argv[1]) : 20000);
  Monitor::Get().Add(&platform, 10);  // from here on it takes failures
  ARefusedCallFailsAlone();
  for (const int named : {1, 2, 7, -1, 1 << 30}) AKernelFailureEndsItsDevice(named);
  printf("done\n");
  fflush(stdout);
  _exit(0);  // the monitor's thread goes on
}
