// Calls the handlers of collectives on GPUs as XLA does, with CUDA and XLA's runtime in fakes. When
// a launch fails, no later call may take what the peers have sent for this one: it is refused, what
// waits is told to end, and what is replayed finds its region closed. Then the same for peers that
// are absent, as the monitor tells (ffi/platform_cuda.h), and for peers that run another operation.
// Exit status 0: all of it is so.
//
//   failed_launch_test [captured|unclosed]
//
// captured: XLA captures the call that fails, and drops the graph. unclosed: the region can't be
// closed, and the error says so.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/native/fake_xla.h"
#include "xla_ffi/ffi/collectives_cuda.h"
#include "xla_ffi/ffi/platform_cuda.h"
#include "xla_ffi/health/call_sites.h"

namespace {

cudaError_t next_status = cudaSuccess;
int launches = 0;
constexpr uintptr_t kClosingStream = 99;

}  // namespace

// CUDA, and what launches kernels.
bool capturing = false;  // the call's stream: what is enqueued there is dropped with the graph
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captured = capturing && reinterpret_cast<uintptr_t>(stream) == stream_of_call;
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t memset_status = cudaSuccess;
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (memset_status != cudaSuccess) return memset_status;
  if (capturing && reinterpret_cast<uintptr_t>(stream) == stream_of_call) return cudaSuccess;
  memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "out of resources"; }

namespace jax_intranode {
cudaStream_t ClosingStreamOf(int) { return reinterpret_cast<cudaStream_t>(kClosingStream); }
cudaError_t Launch(const DeviceOperation&, const DeviceGroup&, const Buffers&, cudaStream_t) {
  ++launches;
  return next_status;
}
cudaError_t Launch(const DeviceOperation&, const DeviceGroup&, const LinkedBuffers&, cudaStream_t) {
  return next_status;
}
cudaError_t Launch(const DeviceOperation&, const DeviceGroup&, const NormCall&, cudaStream_t) {
  return next_status;
}
uint64_t permutations_of_call = 0;
cudaError_t Launch(const DeviceOperation& operation, const DeviceGroup&, const Permutes&,
                   cudaStream_t) {
  permutations_of_call = operation.permutations;
  return next_status;
}
cudaError_t Launch(const DeviceOperation&, const DeviceGroup&, const ExpertsCall&, cudaStream_t) {
  return next_status;
}
cudaError_t Launch(const DeviceOperation&, const DeviceGroup&, const RoutedCall&, cudaStream_t) {
  return next_status;
}
cudaError_t Launch(const DeviceOperation&, const DeviceGroup&, const RaggedCall&, cudaStream_t) {
  return next_status;
}
bool NormFits(ElementType, const NormCall&, LaunchShape) { return true; }
}  // namespace jax_intranode

#define CHECK(condition)                      \
  if (!(condition)) {                         \
    printf("%d: %s\n", __LINE__, #condition); \
    return 1;                                 \
  }                                           \
  static_assert(true)

using namespace jax_intranode;

// A kernel has refused an update of a ragged all-to-all: what the user reads.
int BadUpdate() {
  static FailureRecord record = {};
  auto communicator = std::make_shared<DeviceCommunicator>();
  DeviceGroup group{};
  group.size = 2;
  group.rank = 1;
  group.failure = &record;
  communicator->members[0] = {group, {10, 11}};
  CudaPlatform& platform = CudaPlatform::Get();
  platform.AddNew(
      [&] { return Registry<DeviceCommunicator>::Get().Add({{10, 11}, 2}, communicator); });
  record.algorithm = static_cast<uint32_t>(Algorithm::kRagged);
  record.missing = -1;
  record.fault = {0, 1, 3, 5, -1, 7, 4, 8, 9};
  record.reason = static_cast<uint32_t>(FailureReason::kBadUpdate);
  const std::vector<Failure> failures = platform.TakeFailures();
  CHECK(failures.size() == 1);
  CHECK(TextOf(failures[0]) ==
        "jax_intranode: ragged_all_to_all failed: update 3 from rank 0 to rank 1 has 5 rows from "
        "row -1 of an operand with 8 rows to row 7 of an output with 9 rows, and recv_sizes of "
        "rank 1 says 4 rows. The CUDA context is lost; restart the program.");
  return 0;
}

// What absent peers mean for calls, by the table in health/peer_table.h.
int AbsentPeers() {
  CudaPlatform& platform = CudaPlatform::Get();
  const Clock::time_point start = Clock::now();
  static FailureRecord records[8] = {};
  FailureRecord* record = records;
  std::vector<std::shared_ptr<DeviceCommunicator>> made;
  // A communicator of the devices 10, 11 and 12 in which nothing has failed.
  const auto add = [&](int64_t size) {
    ++record;
    auto communicator = std::make_shared<DeviceCommunicator>();
    DeviceGroup group{};
    group.size = 3;
    group.failure = record;
    group.timeout_ns = 1'000'000'000'000;
    communicator->members[0] = {group, {10, 11, 12}};
    platform.AddNew([&] {
      return Registry<DeviceCommunicator>::Get().Add({{10, 11, 12}, size}, communicator);
    });
    made.push_back(communicator);  // which keeps it alive
    return communicator;
  };
  const auto tell = [&](PeerState of_11, PeerState of_12) {
    AbsentDevices absent;
    absent.Add(11, {of_11, start, "11"});
    absent.Add(12, {of_12, start, "12"});
    platform.SetAbsent(absent);
  };
  // The kernel has waited for the device of this rank for so many seconds; another word each time.
  const auto wait = [&](int missing, int seconds) {
    record->wait = uint64_t{1} | static_cast<uint64_t>(missing) << 32 |
                   static_cast<uint64_t>(seconds) * 100 << 40;
  };
  using enum PeerState;

  auto communicator = add(3);
  CHECK(platform.Look(start, {}).empty());
  wait(1, 20);
  const auto waits = platform.Look(start + std::chrono::seconds(20), {});
  CHECK(waits.size() == 1 && waits[0].missing == 1 && waits[0].waited == std::chrono::seconds(20));
  CHECK(!waits[0].give_up && waits[0].reported && record->abort == 0);
  // Nobody has written for a second: it is over.
  CHECK(platform.Look(start + std::chrono::seconds(22), {}).empty());
  // A late peer is waited for, whoever else has finished.
  tell(kRunning, kFinished);
  CHECK(record->abort == 0 && communicator->Refuse(0).empty());
  wait(1, 30);
  platform.Look(start + std::chrono::seconds(30), {});
  CHECK(record->abort == 0);
  // One that has finished, too, but only for a while.
  wait(2, 2);
  platform.Look(start + std::chrono::seconds(31), {});
  CHECK(record->abort == 0);
  // It takes that back.
  tell(kRunning, kRunning);
  wait(2, 20);
  platform.Look(start + std::chrono::seconds(32), {});
  CHECK(record->abort == 0);
  tell(kRunning, kSilent);
  wait(2, 21);
  platform.Look(start + std::chrono::seconds(33), {});
  CHECK(record->abort == 1 && communicator->Refuse(0).find(": 12. Restart") != std::string::npos);
  // What has given up does not go on when the peer returns.
  tell(kRunning, kRunning);
  CHECK(record->abort == 1);

  communicator = add(4);
  tell(kLeft, kSilent);
  CHECK(record->abort == 1 && communicator->Refuse(0).find(": 11. Restart") != std::string::npos);
  const auto refused = platform.TakeFailures();
  CHECK(!refused.empty() && refused.back().message.find(": 11. Restart") != std::string::npos);
  tell(kLeft, kRunning);  // the return of one does not hide the absence of another
  CHECK(record->abort == 1);

  tell(kRunning, kRunning);
  communicator = add(5);
  CHECK(record->abort == 0);
  tell(kRunning, kLost);
  CHECK(record->abort == 1 && !communicator->failure(0).empty());
  // A communicator that is new knows of the absence, and fails.
  communicator = add(6);
  CHECK(record->abort == 1 && !communicator->failure(0).empty());
  // The record of a kernel that was told to give up says why.
  record->missing = 2;
  record->reason = static_cast<uint32_t>(FailureReason::kAborted);
  const auto failures = platform.TakeFailures();
  CHECK(!failures.empty() && failures[0].reason == FailureReason::kPeerGone &&
        failures[0].detail == ", but 12" && failures[0].device_ids.size() == 3);
  for (const Failure& failure : platform.TakeFailures()) CHECK(failure.rank < 0);
  return 0;
}

// Kernels of matmuls wait for other things than packets, and compare while they wait.
int OtherOperations() {
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
  return 0;
}

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  constexpr size_t kBuffer = 64 << 10;
  std::vector<uint64_t> own((kHeaderBytes + 2 * kBuffer) / 8), other(own.size());
  FailureRecord records[2] = {};
  auto communicator = std::make_shared<DeviceCommunicator>();
  for (int device : {0, 1}) {
    DeviceGroup group{};
    group.region[0] = reinterpret_cast<char*>(own.data());
    group.region[1] = reinterpret_cast<char*>(other.data());
    group.epoch_buffer_bytes = kBuffer;
    group.rank = device;
    group.size = 2;
    group.failure = &records[device];
    communicator->members[device] = {group, {0, 1}};
  }
  Registry<DeviceCommunicator>::Get().Add({{0, 1}, 2}, communicator);

  Frame frame;
  int64_t ids[] = {0, 1}, size = 2;
  int32_t algorithm = static_cast<int32_t>(Algorithm::kOneShot), one = 1, threads = 32;
  XLA_FFI_Array array{XLA_FFI_DataType_S64, 2, ids};
  XLA_FFI_Scalar of_size{XLA_FFI_DataType_S64, &size}, of_one{XLA_FFI_DataType_S32, &one},
      of_threads{XLA_FFI_DataType_S32, &threads}, of_algorithm{XLA_FFI_DataType_S32, &algorithm};
  XLA_FFI_ByteSpan site{"psum", 4};
  frame.attributes = {{"device_ids", {XLA_FFI_AttrType_ARRAY, &array}},
                      {"group_size", {XLA_FFI_AttrType_SCALAR, &of_size}},
                      {"algorithm", {XLA_FFI_AttrType_SCALAR, &of_algorithm}},
                      {"segments", {XLA_FFI_AttrType_SCALAR, &of_one}},
                      {"blocks", {XLA_FFI_AttrType_SCALAR, &of_one}},
                      {"threads", {XLA_FFI_AttrType_SCALAR, &of_threads}},
                      {"site", {XLA_FFI_AttrType_STRING, &site}}};
  CHECK(frame.Run(&CudaCollectiveInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE).empty());
  CHECK(state != nullptr);

  float numbers[4] = {};
  int64_t dims[] = {4};
  XLA_FFI_Buffer x{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, numbers, 1, dims};
  const auto call = [&] {
    return frame.Run(&CudaCollective, XLA_FFI_ExecutionStage_EXECUTE, {x}, {x});
  };
  CHECK(call().empty() && launches == 1);
  CHECK(records[0].abort == 0 && communicator->members[0].group.Header()->closed == 0);

  // Permutes that differ in their permutations alone are different operations.
  Registry<DeviceCommunicator>::Get().Add({{0, 1}, 2, true}, communicator);
  Frame permute = frame;
  int32_t permutes = static_cast<int32_t>(Algorithm::kPermute);
  of_algorithm.value = &permutes;
  int64_t sources[2];
  XLA_FFI_Array of_ranks{XLA_FFI_DataType_S64, 2, sources};
  permute.attributes["sources"] = {XLA_FFI_AttrType_ARRAY, &of_ranks};
  void* const state_of_sum = state;
  const auto permuted = [&](int64_t of_0, int64_t of_1) {
    sources[0] = of_0;
    sources[1] = of_1;
    permute.Run(&CudaCollectiveInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
    permute.Run(&CudaCollective, XLA_FFI_ExecutionStage_EXECUTE, {x}, {x});
    return permutations_of_call;
  };
  const uint64_t swap = permuted(1, 0), to_1 = permuted(-1, 0), to_0 = permuted(1, -1);
  CHECK(swap != 0 && swap != to_1 && swap != to_0 && to_0 != to_1 && permuted(1, 0) == swap);
  state = state_of_sum;

  next_status = cudaSuccess + 1;
  capturing = how == "captured";
  if (how == "unclosed") memset_status = cudaSuccess + 1;
  const std::string failed = call();
  CHECK(failed.find("launching psum on CUDA device 0 failed: out of resources") != failed.npos);
  CHECK((failed.find("memory can't be closed") != failed.npos) == (how == "unclosed"));
  CHECK(launches == 2);

  next_status = cudaSuccess;
  CHECK(call() == failed);  // refused
  CHECK(launches == 2);
  CHECK(records[0].abort == 1 && records[1].abort == 1);  // what waits ends
  // What is replayed gives up.
  CHECK((communicator->members[0].group.Header()->closed != 0) == (how != "unclosed"));
  CHECK(communicator->members[1].group.Header()->closed == 0);  // where calls are refused, too
  Registry<DeviceCommunicator>::Get().Clear();
  communicator.reset();
  if (AbsentPeers() != 0 || OtherOperations() != 0 || BadUpdate() != 0) return 1;
  printf("done\n");
  return 0;
}
