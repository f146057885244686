// Times the all-reduce kernels in CUDA graphs over launch shapes: what the table of
// jax_intranode/_src/select.py is made from. One process a GPU, bf16, random data, results checked.
//
//   launch_shapes [gpus] [minbytes] [maxbytes]
//
// Prints, for each size and algorithm, the shapes in order of time: the median over graph launches,
// the slowest rank's. Build: see tools/README.md.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../xla_ffi/cuda/collectives.h"
#include "../xla_ffi/cuda/slab.h"

using namespace jax_intranode;

namespace {

struct Shared {
  pthread_barrier_t barrier;
  char handles[kMaxRanks][64];
  double time_us[kMaxRanks];
};
Shared* shared;

void Meet() { pthread_barrier_wait(&shared->barrier); }

struct Timing {
  double us;
  int blocks, threads;
};

constexpr size_t kHalf = 128 << 20;
constexpr size_t kMaxMessage = 64 << 20;

uint16_t Bits(size_t i, int rank) {
  uint32_t h = static_cast<uint32_t>(i) * 2654435761u + rank * 40503u;
  h ^= h >> 15;
  const float value = static_cast<float>(h % 2001) / 1000.0f - 1.0f;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

float Value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

long Wrong(const std::vector<uint16_t>& got, int size) {
  long wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    float sum = Value(Bits(i, 0));
    for (int r = 1; r < size; ++r) sum += Value(Bits(i, r));
    const __nv_bfloat16 rounded = __float2bfloat16(sum);
    uint16_t bits;
    memcpy(&bits, &rounded, 2);
    wrong += bits != got[i];
  }
  return wrong;
}

void Rank(int rank, int size, size_t min_bytes, size_t max_bytes) {
  ThrowIfError(cudaSetDevice(rank), "selecting a device");
  auto slab = Slab::Allocate(rank, kHeaderBytes + 2 * kHalf);
  Fill(rank, slab->address() + kHeaderBytes, 0xFF, 2 * kHalf);
  memcpy(shared->handles[rank], slab->Handle().data(), 64);
  Meet();
  std::vector<std::unique_ptr<Slab>> peers;
  DeviceGroup group{};
  for (int r = 0; r < size; ++r) {
    if (r == rank) {
      group.region[r] = slab->address();
    } else {
      peers.push_back(Slab::Open(rank, std::string(shared->handles[r], 64)));
      group.region[r] = peers.back()->address();
    }
  }
  group.half_bytes = kHalf;
  group.rank = rank;
  group.size = size;
  group.timeout_ns = 10'000'000'000;
  void* record;
  ThrowIfError(cudaHostAlloc(&record, sizeof(FailureRecord), cudaHostAllocMapped), "host memory");
  group.failure = new (record) FailureRecord{};
  void *in, *out;
  ThrowIfError(cudaMalloc(&in, kMaxMessage), "input");
  ThrowIfError(cudaMalloc(&out, kMaxMessage), "output");
  {
    std::vector<uint16_t> host(kMaxMessage / 2);
    for (size_t i = 0; i < host.size(); ++i) host[i] = Bits(i, rank);
    ThrowIfError(cudaMemcpy(in, host.data(), kMaxMessage, cudaMemcpyHostToDevice), "input");
  }
  cudaStream_t stream;
  ThrowIfError(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  ThrowIfError(LoadKernels(), "kernels");
  Meet();

  for (size_t bytes = min_bytes; bytes <= max_bytes; bytes *= 4) {
    for (Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot}) {
      if (HalfBytesNeeded(algorithm, ElementType::kBF16, bytes / 16, size) > kHalf) continue;
      if (algorithm == Algorithm::kOneShot && bytes > (size == 2 ? 16u << 20 : 4u << 20)) continue;
      const size_t packs = bytes / 16;
      const size_t work = algorithm == Algorithm::kOneShot ? packs : (packs + size - 1) / size;
      std::vector<Timing> timings;
      long wrong = 0;
      for (int threads : {64, 128, 256, 512}) {
        for (int blocks : {1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256}) {
          if (static_cast<size_t>(blocks - 1) * threads >= work) continue;
          if (static_cast<size_t>(blocks) * threads * 16 < work && blocks < 64) continue;
          const int calls = bytes > (4 << 20) ? 6 : 20;
          ThrowIfError(cudaMemset(out, 0xAB, bytes), "poisoning the output");
          cudaGraph_t graph;
          cudaGraphExec_t program;
          ThrowIfError(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
          for (int k = 0; k < calls; ++k) {
            ThrowIfError(Launch(algorithm, ElementType::kBF16, group, Buffer{in, out, bytes},
                                {blocks, threads}, stream),
                         "launch");
          }
          ThrowIfError(cudaStreamEndCapture(stream, &graph), "capture");
          ThrowIfError(cudaGraphInstantiate(&program, graph, 0), "graph");
          for (int k = 0; k < 3; ++k) ThrowIfError(cudaGraphLaunch(program, stream), "graph");
          ThrowIfError(cudaStreamSynchronize(stream), "graph");
          Meet();
          std::vector<double> times;
          for (int k = 0; k < 9; ++k) {
            cudaEventRecord(begin, stream);
            cudaGraphLaunch(program, stream);
            cudaEventRecord(end, stream);
            ThrowIfError(cudaStreamSynchronize(stream), "graph");
            float ms;
            cudaEventElapsedTime(&ms, begin, end);
            times.push_back(ms * 1e3 / calls);
          }
          std::sort(times.begin(), times.end());
          shared->time_us[rank] = times[times.size() / 2];
          Meet();
          timings.push_back(
              {*std::max_element(shared->time_us, shared->time_us + size), blocks, threads});
          Meet();
          cudaGraphExecDestroy(program);
          cudaGraphDestroy(graph);
        }
      }
      if (bytes <= 1 << 20) {
        std::vector<uint16_t> got(bytes / 2);
        ThrowIfError(cudaMemcpy(got.data(), out, bytes, cudaMemcpyDeviceToHost), "output");
        wrong = Wrong(got, size);
      }
      std::sort(timings.begin(), timings.end(),
                [](const Timing& a, const Timing& b) { return a.us < b.us; });
      if (wrong != 0) printf("rank %d: %ld WRONG\n", rank, wrong);
      if (rank == 0) {
        printf("%d GPUs %9zu B %s:", size, bytes,
               algorithm == Algorithm::kOneShot ? "one-shot" : "two-shot");
        for (size_t k = 0; k < std::min<size_t>(6, timings.size()); ++k) {
          printf("  %.2f us %dx%d", timings[k].us, timings[k].blocks, timings[k].threads);
        }
        printf("\n");
        fflush(stdout);
      }
    }
  }
  Meet();
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? atoi(argv[1]) : 2;
  const size_t min_bytes = argc > 2 ? atol(argv[2]) : 1 << 10;
  const size_t max_bytes = argc > 3 ? atol(argv[3]) : 64 << 20;
  shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->barrier, &attributes, size);
  for (int rank = 0; rank < size; ++rank) {
    if (fork() == 0) {
      try {
        Rank(rank, size, min_bytes, max_bytes);
      } catch (const std::exception& error) {
        printf("rank %d: %s\n", rank, error.what());
        kill(0, SIGKILL);
      }
      fflush(stdout);
      _exit(0);
    }
  }
  int bad = 0;
  for (int rank = 0; rank < size; ++rank) {
    int status;
    wait(&status);
    bad |= status;
  }
  return bad != 0;
}
