// Checks and times the kernels of matmuls of few rows (xla_ffi/cuda/few_rows.h) without XLA.
//
// Rank r is GPU r. With fewer GPUs than ranks, all ranks are streams of GPU 0: then results count,
// and times of sums don't.
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -o few_rows_probe
//       tools/few_rows_probe.cu xla_ffi/cuda/{few_rows.cu,tensor_map.cc,slab.cu} -ldl
//   ./few_rows_probe RANKS check
//   ./few_rows_probe 1 check-many ELEMENTS
//   ./few_rows_probe RANKS graphs
//   ./few_rows_probe RANKS time KxN[,ROWS ...] ...
//
// "check": products of one rank differ from float64 ones by at most K 2^-24 sum|x w| and one
// rounding; a row alone has the bits of the row in a batch; sums are those of the ranks' products
// in rank order. "check-many" does the first for so many elements. "graphs": the two kernels of a
// sum as a child of another graph, in the body of a condition, and updated. "time": the
// microseconds of a matmul (of RANKS 1) or a matmul and its sum in a CUDA graph that takes one w
// after another, so that none is in a cache, for all ways to divide the work.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../xla_ffi/cuda/few_rows.h"
#include "../xla_ffi/cuda/matmul_call.h"
#include "../xla_ffi/cuda/slab.h"

using namespace jax_intranode;

namespace {

constexpr size_t kEpochBufferBytes = size_t{24} << 20;

void Check(cudaError_t status) { ThrowIfError(status, "few_rows_probe"); }

__device__ uint32_t Hash(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

template <class Type>
__device__ float Value(uint16_t bits) {
  float low, high;
  Type::UnpackPair(bits, &low, &high);
  return low;
}

// Roughly normally distributed values, times `scale`.
template <class Type>
__global__ void Fill(uint16_t* to, size_t count, uint32_t seed, float scale) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    const uint32_t h = Hash(static_cast<uint32_t>(i) * 2654435761u + seed + (i >> 32) * 977u);
    uint32_t sum = 0;
    for (int byte = 0; byte < 4; ++byte) sum += h >> 8 * byte & 255;
    to[i] =
        static_cast<uint16_t>(Type::RoundPair((static_cast<int>(sum) - 510) / 148.f * scale, 0));
  }
}

// Counts the elements of a product that are too far from the one of float64.
template <class Type>
__global__ void Compare(FewRowsCall c, unsigned long long* wrong) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
  if (n >= c.n) return;
  const auto* x = static_cast<const uint16_t*>(c.x) + m * c.k;
  const auto* w = static_cast<const uint16_t*>(c.w);
  double sum = 0, most = 0;
  for (int64_t k = 0; k < c.k; ++k) {
    const double product = double{Value<Type>(x[k])} * double{Value<Type>(w[k * c.n + n])};
    sum += product;
    most += fabs(product);
  }
  const double got = Value<Type>(static_cast<const uint16_t*>(c.y)[m * c.n + n]);
  const double bound = c.k * exp2(-24.0) * most;
  const double ulp = std::is_same_v<Type, BF16> ? exp2(-8.0) : exp2(-11.0);
  if (!(fabs(got - sum) <= bound + (fabs(sum) + bound) * ulp + 1e-7)) atomicAdd(wrong, 1ull);
}

struct Partials {
  const uint16_t* of[kMaxRanks];
};
template <class Type>
__global__ void CompareSum(Partials p, int ranks, const uint16_t* y, size_t count,
                           unsigned long long* wrong) {
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  float sum = Value<Type>(p.of[0][i]);
  for (int r = 1; r < ranks; ++r) sum += Value<Type>(p.of[r][i]);
  if (y[i] != static_cast<uint16_t>(Type::RoundPair(sum, 0))) atomicAdd(wrong, 1ull);
}
__global__ void CompareBits(const uint16_t* a, const uint16_t* b, size_t count,
                            unsigned long long* wrong) {
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  if (i < count && a[i] != b[i]) atomicAdd(wrong, 1ull);
}
__global__ void Delay(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

std::string Text(const FewRowsPlan& plan) {
  return "split " + std::to_string(plan.split) + ", " + std::to_string(plan.blocks_per_sm) +
         " blocks per SM";
}

// Ways to divide a matmul, first the one that is used.
std::vector<FewRowsPlan> Plans(int k, int n) {
  std::vector<FewRowsPlan> plans{FewRowsPlanOf(1, k, n)};
  const int64_t tiles = DivideUp(n, kFewRowsColumns);
  for (int split = 1; split <= std::min<int64_t>(8, DivideUp(k, kTileDepth)); ++split) {
    for (const int per_sm : {1, 2, 3}) {
      const bool fits = split == 1 || tiles * split <= 132 * per_sm;
      const bool is_first = split == plans[0].split && per_sm == plans[0].blocks_per_sm;
      if (fits && !is_first && tiles * split >= 60) plans.push_back({split, per_sm});
    }
  }
  return plans;
}

struct Rank {
  int device;
  cudaStream_t stream;
  DeviceGroup group;
};

class Probe {
 public:
  explicit Probe(int count) : ranks_(count) {
    int gpus;
    Check(cudaGetDeviceCount(&gpus));
    shared_ = gpus < count;
    std::vector<char*> regions;
    for (int r = 0; r < count; ++r) {
      Rank& rank = ranks_[r];
      rank.device = shared_ ? 0 : r;
      Check(cudaSetDevice(rank.device));
      for (int peer = 0; peer < count && !shared_; ++peer) {
        if (peer != r) EnablePeerAccess(r, peer);
      }
      Check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      void* region;
      Check(cudaMalloc(&region, kHeaderBytes + 2 * kEpochBufferBytes));
      Check(cudaMemset(region, 0, kHeaderBytes));
      Check(cudaMemset(static_cast<char*>(region) + kHeaderBytes, 0xFF, 2 * kEpochBufferBytes));
      regions.push_back(static_cast<char*>(region));
      LoadFewRowsKernels();
      Check(cudaDeviceSynchronize());
    }
    for (int r = 0; r < count; ++r) {
      DeviceGroup& group = ranks_[r].group;
      group = {};
      std::copy(regions.begin(), regions.end(), group.region);
      group.epoch_buffer_bytes = kEpochBufferBytes;
      group.rank = r;
      group.size = count;
      Check(cudaHostAlloc(&group.failure, sizeof(FailureRecord), cudaHostAllocPortable));
      memset(static_cast<void*>(group.failure), 0, sizeof(FailureRecord));
      group.timeout_ns = 3'000'000'000;
    }
  }

  int count() const { return static_cast<int>(ranks_.size()); }

  void Free() {
    for (uint16_t* at : allocated_) Check(cudaFree(at));
    allocated_.clear();
  }

  template <class Type>
  unsigned long long CheckShape(int k, int n, const FewRowsPlan& plan, bool every_row) {
    const ElementType type = std::is_same_v<Type, BF16> ? ElementType::kBF16 : ElementType::kF16;
    constexpr int kMost = static_cast<int>(kMostFewRows);
    const size_t out = size_t{kMost} * n;
    std::vector<uint16_t*> x, w, whole, part, y;
    for (int r = 0; r < count(); ++r) {
      Check(cudaSetDevice(ranks_[r].device));
      x.push_back(Allocate(size_t{kMost} * k));
      w.push_back(Allocate(size_t{1} * k * n));
      whole.push_back(Allocate(out));
      part.push_back(Allocate(out));
      y.push_back(Allocate(out));
      const cudaStream_t stream = ranks_[r].stream;
      Fill<Type><<<256, 256, 0, stream>>>(x[r], size_t{kMost} * k, ++seed_, 1.f);
      Fill<Type><<<1024, 256, 0, stream>>>(w[r], size_t{1} * k * n, ++seed_, 0.05f);
      Check(cudaMemsetAsync(whole[r], 0xFF, 2 * out, stream));
      LaunchFewRows({type, kMost, k, n, x[r], w[r], whole[r]}, plan, nullptr, stream);
    }
    Synchronize();
    unsigned long long far = 0, rows = 0, sums = 0;
    for (int r = 0; r < count(); ++r) {
      Check(cudaSetDevice(ranks_[r].device));
      far += Count([&](unsigned long long* wrong) {
        Compare<Type><<<dim3((n + 127) / 128, kMost), 128>>>(
            {type, kMost, k, n, x[r], w[r], whole[r]}, wrong);
      });
    }
    Check(cudaSetDevice(ranks_[0].device));
    for (const int m : {1, 2, 3, 8, 15, 16, 17, 32, 33, 63}) {
      LaunchFewRows({type, m, k, n, x[0], w[0], part[0]}, plan, nullptr, ranks_[0].stream);
      Synchronize();
      rows += Different(part[0], whole[0], size_t{1} * m * n);
    }
    for (int m = 1; m < kMost; m += every_row ? 1 : 13) {
      LaunchFewRows({type, 1, k, n, x[0] + size_t{1} * m * k, w[0], part[0]}, plan, nullptr,
                    ranks_[0].stream);
      Synchronize();
      rows += Different(part[0], whole[0] + size_t{1} * m * n, n);
    }
    if (count() > 1) {
      static std::mt19937 random(1);
      for (const int m : {1, 2, 3, 8, 15, 16, 17, 32, 33, 64}) {
        // Several after each other: epochs of both parities, some rank late.
        for (int call = 0; call < 4; ++call) {
          for (int r = 0; r < count(); ++r) {
            Check(cudaSetDevice(ranks_[r].device));
            if (call == 0) Check(cudaMemsetAsync(y[r], 0xFF, 2 * out, ranks_[r].stream));
            Delay<<<1, 1, 0, ranks_[r].stream>>>(random() % 30000);
            LaunchFewRows({type, m, k, n, x[r], w[r], y[r]}, plan, &ranks_[r].group,
                          ranks_[r].stream);
          }
        }
        Synchronize();
        Partials p;
        for (int r = 0; r < count(); ++r) {
          Check(cudaSetDevice(ranks_[r].device));
          for (int q = 0; q < count(); ++q) {
            uint16_t* copy = Allocate(out);
            Check(cudaMemcpy(copy, whole[q], 2 * out, cudaMemcpyDefault));
            p.of[q] = copy;
          }
          const size_t elements = size_t{1} * m * n;
          sums += Count([&](unsigned long long* wrong) {
            CompareSum<Type><<<(elements + 255) / 256, 256>>>(p, count(), y[r], elements, wrong);
          });
        }
      }
      sums += BytesLeft();
    }
    Free();
    if (far + rows + sums > 0) {
      printf("WRONG %s K %d N %d %s: %llu too far, %llu differ alone, %llu wrong sums\n",
             type == ElementType::kBF16 ? "bf16" : "f16", k, n, Text(plan).c_str(), far, rows,
             sums);
    }
    return far + rows + sums;
  }

  unsigned long long CheckMany(double elements) {
    unsigned long long wrong = 0;
    for (double done = 0; done < elements; done += 64.0 * 8192) {
      const int k = 512 << (seed_ / 2 % 4), n = 8192;
      uint16_t *x = Allocate(64 * k), *w = Allocate(size_t{1} * k * n), *y = Allocate(64 * n);
      const cudaStream_t stream = ranks_[0].stream;
      Fill<BF16><<<256, 256, 0, stream>>>(x, 64 * k, ++seed_, 1.f);
      Fill<BF16><<<1024, 256, 0, stream>>>(w, size_t{1} * k * n, ++seed_, 0.05f);
      const FewRowsCall call{ElementType::kBF16, 64, k, n, x, w, y};
      LaunchFewRows(call, FewRowsPlanOf(64, k, n), nullptr, stream);
      Synchronize();
      wrong += Count(
          [&](unsigned long long* at) { Compare<BF16><<<dim3(n / 128, 64), 128>>>(call, at); });
      Free();
    }
    return wrong;
  }

  // Runs sums as parts of larger graphs.
  void Graphs() {
    const int k = 2048, n = 4096, m = 16;
    const FewRowsPlan plan = FewRowsPlanOf(m, k, n);
    std::vector<uint16_t*> x, w, y;
    for (int r = 0; r < count(); ++r) {
      Check(cudaSetDevice(ranks_[r].device));
      x.push_back(Allocate(m * k));
      w.push_back(Allocate(size_t{1} * k * n));
      y.push_back(Allocate(m * n));
      Fill<BF16><<<256, 256, 0, ranks_[r].stream>>>(x[r], m * k, r + 1, 1.f);
      Fill<BF16><<<1024, 256, 0, ranks_[r].stream>>>(w[r], size_t{1} * k * n, r + 11, 0.05f);
    }
    const auto launch = [&](int r, cudaStream_t stream) {
      LaunchFewRows({ElementType::kBF16, m, k, n, x[r], w[r], y[r]}, plan, &ranks_[r].group,
                    stream);
    };
    for (int r = 0; r < count(); ++r) {
      Check(cudaSetDevice(ranks_[r].device));
      launch(r, ranks_[r].stream);
    }
    Synchronize();
    std::vector<uint16_t> want(m * n), got(m * n);
    Check(cudaMemcpy(want.data(), y[0], 2 * m * n, cudaMemcpyDefault));
    const auto capture = [&](int r) {
      cudaGraph_t graph;
      cudaStream_t stream;
      Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      launch(r, stream);
      launch(r, stream);
      Check(cudaStreamEndCapture(stream, &graph));
      return graph;
    };
    const auto run = [&](const char* name, const std::function<cudaGraphExec_t(int)>& make) {
      try {
        std::vector<cudaGraphExec_t> execs;
        for (int r = 0; r < count(); ++r) {
          Check(cudaSetDevice(ranks_[r].device));
          Check(cudaMemset(y[r], 0xFF, 2 * m * n));
          execs.push_back(make(r));
        }
        for (int i = 0; i < 3; ++i) {
          for (int r = 0; r < count(); ++r) {
            Check(cudaSetDevice(ranks_[r].device));
            Check(cudaGraphLaunch(execs[r], ranks_[r].stream));
          }
        }
        Synchronize();
        bool right = true;
        for (int r = 0; r < count(); ++r) {
          Check(cudaMemcpy(got.data(), y[r], 2 * m * n, cudaMemcpyDefault));
          right = right && got == want;
        }
        printf("graphs: %s: %s\n", name, right ? "right" : "WRONG");
      } catch (const std::exception& error) {
        printf("graphs: %s: FAILED: %s\n", name, error.what());
      }
      fflush(stdout);
    };
    run("captured", [&](int r) {
      cudaGraphExec_t exec;
      Check(cudaGraphInstantiate(&exec, capture(r), 0));
      return exec;
    });
    run("child", [&](int r) {
      cudaGraph_t parent;
      cudaGraphNode_t one, two;
      Check(cudaGraphCreate(&parent, 0));
      Check(cudaGraphAddChildGraphNode(&one, parent, nullptr, 0, capture(r)));
      Check(cudaGraphAddChildGraphNode(&two, parent, &one, 1, capture(r)));
      cudaGraphExec_t exec;
      Check(cudaGraphInstantiate(&exec, parent, 0));
      return exec;
    });
    run("child, updated", [&](int r) {
      cudaGraph_t parent;
      cudaGraphNode_t one;
      Check(cudaGraphCreate(&parent, 0));
      Check(cudaGraphAddChildGraphNode(&one, parent, nullptr, 0, capture(r)));
      cudaGraphExec_t exec;
      Check(cudaGraphInstantiate(&exec, parent, 0));
      uint16_t* const moved = Allocate(m * k);
      Check(cudaMemcpy(moved, x[r], 2 * m * k, cudaMemcpyDefault));
      x[r] = moved;
      Check(cudaGraphExecChildGraphNodeSetParams(exec, one, capture(r)));
      return exec;
    });
    run("whole graph updated", [&](int r) {
      cudaGraphExec_t exec;
      Check(cudaGraphInstantiate(&exec, capture(r), 0));
      cudaGraphExecUpdateResultInfo info;
      Check(cudaGraphExecUpdate(exec, capture(r), &info));
      return exec;
    });
    run("in the body of a condition", [&](int r) {
      cudaGraph_t parent;
      Check(cudaGraphCreate(&parent, 0));
      cudaGraphConditionalHandle handle;
      Check(cudaGraphConditionalHandleCreate(&handle, parent, 1, cudaGraphCondAssignDefault));
      cudaGraphNodeParams params = {};
      params.type = cudaGraphNodeTypeConditional;
      params.conditional.handle = handle;
      params.conditional.type = cudaGraphCondTypeIf;
      params.conditional.size = 1;
      cudaGraphNode_t node, child;
      Check(cudaGraphAddNode(&node, parent, nullptr, nullptr, 0, &params));
      Check(cudaGraphAddChildGraphNode(&child, params.conditional.phGraph_out[0], nullptr, 0,
                                       capture(r)));
      cudaGraphExec_t exec;
      Check(cudaGraphInstantiate(&exec, parent, 0));
      return exec;
    });
  }

  void Time(int k, int n, const std::vector<int>& rows) {
    const size_t bytes = size_t{2} * k * n;
    const int weights = std::clamp(static_cast<int>(2'500'000'000 / bytes), 4, 64);
    std::vector<uint16_t*> x, w, y;
    for (Rank& rank : ranks_) {
      Check(cudaSetDevice(rank.device));
      x.push_back(Allocate(64 * k));
      w.push_back(Allocate(bytes / 2 * weights));
      y.push_back(Allocate(64 * n));
      Fill<BF16><<<64, 256, 0, rank.stream>>>(x.back(), 64 * k, ++seed_, 1.f);
      Fill<BF16><<<1024, 256, 0, rank.stream>>>(w.back(), bytes / 2 * weights, ++seed_, 0.05f);
    }
    Synchronize();
    for (const int m : rows) {
      struct Timed {
        double us;
        FewRowsPlan plan;
      };
      std::vector<Timed> all;
      const auto time = [&](const FewRowsPlan& plan) {
        try {
          all.push_back({TimePlan(plan, k, n, m, weights, x, w, y), plan});
        } catch (const std::exception& error) {
          printf("K %d N %d M %d %s: FAILED %s\n", k, n, m, Text(plan).c_str(), error.what());
          cudaGetLastError();
        }
      };
      for (const FewRowsPlan& plan : Plans(k, n)) time(plan);
      std::sort(all.begin(), all.end(), [](const Timed& a, const Timed& b) { return a.us < b.us; });
      for (size_t i = 0; i < all.size(); ++i) {
        printf("ranks %d K %d N %d M %d: %.2f us, %.2f TB/s, %s\n", count(), k, n, m, all[i].us,
               bytes / all[i].us / 1e6, Text(all[i].plan).c_str());
      }
      fflush(stdout);
    }
    Free();
  }

 private:
  double TimePlan(const FewRowsPlan& plan, int k, int n, int m, int weights,
                  const std::vector<uint16_t*>& x, const std::vector<uint16_t*>& w,
                  const std::vector<uint16_t*>& y) {
    std::vector<cudaGraphExec_t> execs;
    std::vector<std::pair<cudaEvent_t, cudaEvent_t>> events;
    for (int r = 0; r < count(); ++r) {
      Check(cudaSetDevice(ranks_[r].device));
      cudaGraph_t graph;
      Check(cudaStreamBeginCapture(ranks_[r].stream, cudaStreamCaptureModeThreadLocal));
      std::string failed;
      try {
        for (int i = 0; i < weights; ++i) {
          LaunchFewRows({ElementType::kBF16, m, k, n, x[r], w[r] + size_t{1} * i * k * n, y[r]},
                        plan, count() > 1 ? &ranks_[r].group : nullptr, ranks_[r].stream);
        }
      } catch (const std::exception& error) {
        failed = error.what();
      }
      Check(cudaStreamEndCapture(ranks_[r].stream, &graph));
      if (!failed.empty()) throw std::runtime_error(failed);
      execs.emplace_back();
      Check(cudaGraphInstantiate(&execs.back(), graph, 0));
      Check(cudaGraphDestroy(graph));
      events.emplace_back();
      Check(cudaEventCreate(&events.back().first));
      Check(cudaEventCreate(&events.back().second));
    }
    constexpr int kRuns = 5;
    std::vector<float> times;
    for (int run = -1; run < kRuns; ++run) {
      const int repeats = 4;
      for (int i = 0; i < repeats; ++i) {
        for (int r = 0; r < count(); ++r) {
          Check(cudaSetDevice(ranks_[r].device));
          if (i == 1) Check(cudaEventRecord(events[r].first, ranks_[r].stream));
          Check(cudaGraphLaunch(execs[r], ranks_[r].stream));
        }
      }
      float slowest = 0;
      for (int r = 0; r < count(); ++r) {
        Check(cudaSetDevice(ranks_[r].device));
        Check(cudaEventRecord(events[r].second, ranks_[r].stream));
      }
      Synchronize();
      for (int r = 0; r < count(); ++r) {
        float ms;
        Check(cudaSetDevice(ranks_[r].device));
        Check(cudaEventElapsedTime(&ms, events[r].first, events[r].second));
        slowest = std::max(slowest, ms);
      }
      if (run >= 0) times.push_back(slowest * 1e3f / (repeats - 1) / weights);
    }
    for (cudaGraphExec_t exec : execs) Check(cudaGraphExecDestroy(exec));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  template <class Launch>
  unsigned long long Count(Launch launch) {
    unsigned long long *wrong, found = 0;
    Check(cudaMalloc(&wrong, sizeof found));
    Check(cudaMemset(wrong, 0, sizeof found));
    launch(wrong);
    Check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    Check(cudaFree(wrong));
    return found;
  }
  unsigned long long Different(const uint16_t* a, const uint16_t* b, size_t count) {
    return Count([&](unsigned long long* wrong) {
      CompareBits<<<(count + 255) / 256, 256>>>(a, b, count, wrong);
    });
  }

  uint16_t* Allocate(size_t elements) {
    void* at;
    Check(cudaMalloc(&at, 2 * elements));
    allocated_.push_back(static_cast<uint16_t*>(at));
    return allocated_.back();
  }

  void Synchronize() {
    cudaError_t status = cudaSuccess;
    for (Rank& rank : ranks_) {
      Check(cudaSetDevice(rank.device));
      const cudaError_t of_rank = cudaStreamSynchronize(rank.stream);
      if (status == cudaSuccess) status = of_rank;
    }
    for (const Rank& rank : ranks_) {
      if (rank.group.failure->reason == 0) continue;
      printf("rank %d gave up: reason %u, it waited for rank %d\n", rank.group.rank,
             rank.group.failure->reason, rank.group.failure->missing);
    }
    Check(status);
  }

  // Bytes of the epoch buffers that are not empty.
  unsigned long long BytesLeft() {
    unsigned long long left = 0;
    std::vector<char> host(2 * kEpochBufferBytes);
    for (const Rank& rank : ranks_) {
      Check(cudaMemcpy(host.data(), rank.group.region[rank.group.rank] + kHeaderBytes, host.size(),
                       cudaMemcpyDefault));
      left += host.size() - std::count(host.begin(), host.end(), static_cast<char>(0xFF));
    }
    return left;
  }

  std::vector<Rank> ranks_;
  std::vector<uint16_t*> allocated_;
  bool shared_;
  uint32_t seed_ = 0;
};

int Run(int argc, char** argv) {
  const int ranks = std::atoi(argv[1]);
  const std::string what = argv[2];
  Probe probe(ranks);
  if (what == "check") {
    unsigned long long wrong = 0;
    const int shapes[][2] = {{2048, 4096}, {1024, 4096}, {7168, 4096}, {4096, 8192}, {4096, 3072},
                             {1000, 1032}, {72, 8},      {8, 72},      {136, 64},    {4096, 200}};
    for (const auto& [k, n] : shapes) {
      for (const FewRowsPlan& plan : Plans(k, n)) {
        wrong += probe.CheckShape<BF16>(k, n, plan, plan.split == 2);
        if (plan.blocks_per_sm == 1) wrong += probe.CheckShape<F16>(k, n, plan, false);
      }
      printf("checked K %d N %d: %llu wrong so far\n", k, n, wrong);
      fflush(stdout);
    }
    printf("check with %d ranks: %llu wrong\n", ranks, wrong);
    return wrong > 0;
  }
  if (what == "check-many") {
    const unsigned long long wrong = probe.CheckMany(std::atof(argv[3]));
    printf("%s elements: %llu wrong\n", argv[3], wrong);
    return wrong > 0;
  }
  if (what == "graphs") {
    probe.Graphs();
    return 0;
  }
  for (int i = 3; i < argc; ++i) {
    int k, n, used;
    if (sscanf(argv[i], "%dx%d%n", &k, &n, &used) != 2) return 2;
    std::vector<int> rows;
    for (const char* at = argv[i] + used; *at == ','; at += used) {
      rows.emplace_back();
      if (sscanf(at, ",%d%n", &rows.back(), &used) != 1) return 2;
    }
    probe.Time(k, n, rows.empty() ? std::vector<int>{1, 16, 32, 64} : rows);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    printf("%s\n", error.what());
    return 1;
  }
}
