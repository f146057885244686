// Checks and times the fused kernel of collective matmuls (xla_ffi/cuda/fused_matmul.h) without XLA
// and without graphs.
//
// Needs at least two GPUs. If there are fewer GPUs than ranks, they stand for the ranks: GPU d is
// rank d of a group of its own, in which the following ranks are the other GPUs in turn. So each
// GPU sends and receives as much as among that many GPUs, over the same links, but waits for fewer
// peers. Such a run can't find two faults: shards of two peers that are the same GPU, taken for
// each other; and faults of ranks whose numbers are higher than those of the GPUs.
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I xla_ffi/cuda -o fused_probe \
//       tools/fused_probe.cu
//       xla_ffi/cuda/{fused_matmul.cc,fused_bf16.cu,fused_f16.cu,slab.cu,tensor_map.cc,cublas_lt.cc}
//       -ldl
//   ./fused_probe RANKS check
//   ./fused_probe RANKS all_gather_matmul|matmul_reduce_scatter M,K,N[,SETTLE_MS[,LINK_GB_S]] \
//       PLAN ...
//
// M, K and N are those of the matmul on one GPU. A PLAN is a list name=value,name=value of the
// fields of MatmulPlan (matmul_plan.h), as for `bench --plan`; fields that are left out have their
// defaults. tile_columns is required. With wgrad=1 the kernel also computes a weight gradient
// [N, K]. With wgrad_after=1 a matmul of the same size follows the kernel instead. Several plans
// are timed in alternation, each after it has run for SETTLE_MS, or after a pause. "share" is the
// time that matmul or links take at least, divided by the measured time; LINK_GB_S is the rate of
// the links (an H200's by default). libcublasLt.so, which times the matmul alone, is found as the
// package finds it.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cublas_lt.h"
#include "fused_matmul.h"
#include "slab.h"

using namespace jax_intranode;

namespace {

constexpr size_t kRingBytes = size_t{512} << 20;

void Check(cudaError_t status) { ThrowIfError(status, "fused_probe"); }

__device__ uint32_t Hash(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}
__device__ uint16_t Rounded(float value) {
  const uint32_t bits = __float_as_uint(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
__device__ float Float(uint16_t bf16) { return __uint_as_float(uint32_t{bf16} << 16); }

// Fills an operand: integers from -2 to 2, whose products and sums are exact, or values that are
// roughly normally distributed, with which a matmul draws as much power as in training.
__global__ void Fill(uint16_t* to, size_t count, uint32_t seed, bool exact) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint32_t h = Hash(static_cast<uint32_t>(i) * 2654435761u + seed);
    float value = static_cast<int>(h % 5) - 2;
    if (!exact) {
      uint32_t sum = 0;
      for (int byte = 0; byte < 4; ++byte) sum += h >> 8 * byte & 255;
      value = (static_cast<int>(sum) - 510) / 148.f;
    }
    to[i] = Rounded(value);
  }
}

// The operands of the ranks in the group of a GPU.
struct Operands {
  int rank;  // of the GPU
  const uint16_t *x[kMaxRanks], *w[kMaxRanks];
  int shard[kMaxRanks];  // reduce-scatter: the shard of a rank's products that comes to the GPU
};
struct Sizes {
  bool reduce_scatter;
  int ranks, outer, rows, k, n;  // `rows` of one outer index of a shard
  bool transposed, gathered;
  bool wgrad = false;

  Algorithm algorithm() const {
    return reduce_scatter ? Algorithm::kMatmulReduceScatter : Algorithm::kAllGatherMatmul;
  }
  // Numbers of elements.
  size_t OfX() const { return size_t{1} * outer * rows * k * (reduce_scatter ? ranks : 1); }
  size_t OfW() const { return size_t{1} * k * n; }
  size_t OfProduct() const { return size_t{1} * outer * rows * n * (reduce_scatter ? 1 : ranks); }
  size_t OfGathered() const { return size_t{1} * outer * rows * ranks * k; }
  size_t OfWgradLhs() const { return size_t{1} * outer * rows * ranks * n; }
};

// Counts the wrong elements among `samples` elements of a product, and of the gathered x.
__global__ void Compare(Sizes s, Operands of, const uint16_t* result, const uint16_t* gathered,
                        int samples, unsigned* wrong) {
  const int sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample >= samples) return;
  const int rows = s.rows * (s.reduce_scatter ? 1 : s.ranks);
  const int row = sample < s.n ? rows - 1 : Hash(sample * 3) % rows;  // all columns of the last one
  const int array = Hash(sample * 7) % s.outer;
  const int column = sample < s.n ? sample : Hash(sample * 5) % s.n;
  const auto dot = [&](const uint16_t* x, const uint16_t* w) {
    float sum = 0;
    for (int k = 0; k < s.k; ++k) {
      sum += Float(x[k]) *
             Float(w[s.transposed ? size_t{1} * column * s.k + k : size_t{1} * k * s.n + column]);
    }
    return Float(Rounded(sum));
  };
  float want = -0.f;
  if (s.reduce_scatter) {
    for (int rank = 0; rank < s.ranks; ++rank) {
      const size_t shard = size_t{1} * array * s.ranks + of.shard[rank];
      want += dot(of.x[rank] + (shard * s.rows + row) * s.k, of.w[rank]);
    }
    want = Float(Rounded(want));
  } else {
    const uint16_t* const x =
        of.x[row / s.rows] + (size_t{1} * array * s.rows + row % s.rows) * s.k;
    want = dot(x, of.w[of.rank]);
    const int k = Hash(sample * 11) % s.k;
    if (gathered != nullptr && gathered[(size_t{1} * array * rows + row) * s.k + k] != x[k]) {
      atomicAdd(wrong, 1);
    }
  }
  if (Float(result[(size_t{1} * array * rows + row) * s.n + column]) != want) atomicAdd(wrong, 1);
}

// The same for a weight gradient.
__global__ void CompareWgrad(Sizes s, Operands of, const uint16_t* lhs, const uint16_t* wgrad,
                             int samples, unsigned* wrong) {
  const int sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample >= samples) return;
  const int row = sample < s.k ? s.n - 1 : Hash(sample * 3) % s.n;
  const int column = sample < s.k ? sample : Hash(sample * 5) % s.k;
  float sum = 0;
  for (int array = 0; array < s.outer; ++array) {
    for (int at = 0; at < s.ranks * s.rows; ++at) {
      const size_t all = size_t{1} * array * s.ranks * s.rows + at;
      const size_t of_shard = size_t{1} * array * s.rows + at % s.rows;
      const uint16_t x = s.reduce_scatter ? of.x[of.rank][all * s.k + column]
                                          : of.x[at / s.rows][of_shard * s.k + column];
      sum += Float(lhs[all * s.n + row]) * Float(x);
    }
  }
  if (Float(wgrad[size_t{1} * row * s.k + column]) != Float(Rounded(sum))) {
    atomicAdd(wrong, 1);
  }
}

struct Gpu {
  MatmulMember member = {};
  cudaStream_t stream;
  cudaEvent_t begin, end;
  void* workspace;
};
std::vector<Gpu> gpus;

// The GPUs that stand for a rank of GPU d's group: the one that receives what GPU d sends to that
// rank, and the one that sends as that rank; and the rank that GPU d is to the latter.
struct Peer {
  int receiver, sender, to_sender;
};
Peer PeerOf(int ranks, int d, int rank) {
  const int count = static_cast<int>(gpus.size());
  const int after = (rank - d + ranks) % ranks, before = (ranks - after) % ranks;
  if (after == 0) return {d, d, d};
  const int sender = (d + count - 1 - (before - 1) % (count - 1)) % count;
  return {(d + 1 + (after - 1) % (count - 1)) % count, sender, (sender + before) % ranks};
}

template <class F>
void OnEach(F&& f) {
  for (int d = 0; d < static_cast<int>(gpus.size()); ++d) {
    Check(cudaSetDevice(d));
    f(d);
  }
}

void Open(int ranks) {
  int visible;
  Check(cudaGetDeviceCount(&visible));
  if (visible < 2) {
    std::printf("%d GPUs are visible; two or more are needed\n", visible);
    std::exit(2);
  }
  const int count = std::min(visible, ranks);
  gpus.resize(count);
  std::vector<char*> rings(count), regions(count);
  FailureRecord* records;
  Check(cudaHostAlloc(reinterpret_cast<void**>(&records), 4096, cudaHostAllocPortable));
  std::memset(static_cast<void*>(records), 0, 4096);
  OnEach([&](int d) {
    for (int peer = 0; peer < count; ++peer) {
      if (peer != d) Check(cudaDeviceEnablePeerAccess(peer, 0));
    }
    Check(cudaMalloc(&rings[d], kRingBytes));
    Check(cudaMemset(rings[d], 0, kRingBytes));
    Check(cudaMalloc(&regions[d], 1 << 20));
    Check(cudaMemset(regions[d], 0, 1 << 20));
    Check(cudaMalloc(&gpus[d].workspace, kMatmulWorkspaceBytes));
    Check(cudaStreamCreateWithFlags(&gpus[d].stream, cudaStreamNonBlocking));
    Check(cudaEventCreate(&gpus[d].begin));
    Check(cudaEventCreate(&gpus[d].end));
    LoadFusedKernels();
    Check(cudaDeviceSynchronize());
  });
  for (int d = 0; d < count; ++d) {
    MatmulMember& member = gpus[d].member;
    member.device = d;
    member.ring_bytes = kRingBytes;
    member.group.rank = d;
    member.group.size = ranks;
    member.group.failure = records + d;
    member.group.timeout_ns = 5'000'000'000;
    for (int rank = 0; rank < ranks; ++rank) {
      const Peer peer = PeerOf(ranks, d, rank);
      member.ring[rank] = rings[peer.receiver];
      // A grant to a rank goes to the GPU that sends as that rank, to the word that it reads.
      member.group.region[rank] =
          regions[peer.sender] + (peer.to_sender - d) * int64_t{sizeof(uint64_t)};
    }
  }
}

void Synchronize() {
  OnEach([&](int d) {
    const cudaError_t status = cudaStreamSynchronize(gpus[d].stream);
    const FailureRecord* const record = gpus[d].member.group.failure;
    if (status != cudaSuccess) {
      std::printf("GPU %d: %s; reason %u, missing rank %d\n", d, cudaGetErrorString(status),
                  record->reason, record->missing);
      std::exit(1);
    }
  });
}

// One operation with the operands and results of all GPUs.
class Call {
 public:
  Call(const Sizes& sizes, const MatmulPlan& plan, bool exact)
      : s_(sizes), plan_(plan), calls_(gpus.size()) {
    OnEach([&](int d) {
      MatmulCall& c = calls_[d];
      c.type = ElementType::kBF16;
      c.transposed = s_.transposed;
      c.outer = s_.outer;
      c.rows = s_.rows;
      c.ks = {s_.k};
      c.ns = {s_.n};
      uint16_t* const x = Allocate<uint16_t>(s_.OfX());
      uint16_t* const w = Allocate<uint16_t>(s_.OfW());
      Fill<<<512, 256>>>(x, s_.OfX(), 1000 * d + 1, exact);
      Fill<<<512, 256>>>(w, s_.OfW(), 1000 * d + 7, exact);
      c.xs = {x};
      c.ws = {w};
      c.products = {Allocate<uint16_t>(s_.OfProduct())};
      if (s_.gathered) c.gathered = Allocate<uint16_t>(s_.OfGathered());
      if (s_.wgrad) {
        uint16_t* const lhs = Allocate<uint16_t>(s_.OfWgradLhs());
        Fill<<<512, 256>>>(lhs, s_.OfWgradLhs(), 1000 * d + 13, exact);
        c.wgrad_lhs = lhs;
        c.wgrads = {Allocate<uint16_t>(s_.OfW())};
      }
      if (FusedRingBytes(s_.algorithm(), c, s_.ranks, plan_) > gpus[d].member.data_bytes()) {
        std::printf("it does not fit rings of %zu bytes\n", kRingBytes);
        std::exit(2);
      }
      scratch_bytes_ = FusedScratchBytes(s_.algorithm(), c, s_.ranks, plan_) + 1;
      c.scratch = Allocate<char>(scratch_bytes_);
      Check(cudaDeviceSynchronize());
    });
  }
  ~Call() {
    for (void* at : allocated_) cudaFree(at);
  }

  void Enqueue() {
    OnEach([&](int d) {
      LaunchFused(gpus[d].member, s_.algorithm(), plan_, calls_[d], gpus[d].stream);
    });
  }
  unsigned Wrong() {
    unsigned all = 0;
    OnEach([&](int d) {
      // NaN everywhere, so that nothing is left of an earlier call.
      Check(cudaMemset(gpus[d].member.Data(d), 0xff, gpus[d].member.data_bytes()));
      Check(cudaMemset(calls_[d].scratch, 0xff, scratch_bytes_));
      Check(cudaMemset(calls_[d].products[0], 0xff, 2 * s_.OfProduct()));
      if (s_.gathered) Check(cudaMemset(calls_[d].gathered, 0xff, 2 * s_.OfGathered()));
      for (void* wgrad : calls_[d].wgrads) {
        Check(cudaMemset(wgrad, 0xff, 2 * s_.OfW()));
      }
      Check(cudaDeviceSynchronize());
    });
    Enqueue();
    Synchronize();
    OnEach([&](int d) {
      Operands of = {};
      of.rank = d;
      for (int rank = 0; rank < s_.ranks; ++rank) {
        const Peer peer = PeerOf(s_.ranks, d, rank);
        const MatmulCall& c = calls_[peer.sender];
        of.x[rank] = static_cast<const uint16_t*>(c.x());
        of.w[rank] = static_cast<const uint16_t*>(c.ws[0]);
        of.shard[rank] = peer.to_sender;
      }
      unsigned *wrong, found;
      Check(cudaMalloc(&wrong, sizeof found));
      Check(cudaMemset(wrong, 0, sizeof found));
      const int samples = std::max(20000, 2 * s_.n);
      Compare<<<(samples + 127) / 128, 128>>>(
          s_, of, static_cast<const uint16_t*>(calls_[d].products[0]),
          static_cast<const uint16_t*>(calls_[d].gathered), samples, wrong);
      for (const void* wgrad : calls_[d].wgrads) {
        const int samples = std::max(2000, 2 * s_.k);
        CompareWgrad<<<(samples + 127) / 128, 128>>>(
            s_, of, static_cast<const uint16_t*>(calls_[d].wgrad_lhs),
            static_cast<const uint16_t*>(wgrad), samples, wrong);
      }
      Check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
      Check(cudaFree(wrong));
      all += found;
    });
    return all;
  }

  // The matmul of all rows, by cuBLASLt.
  void EnqueueMatmul() {
    const int64_t rows = int64_t{s_.outer} * s_.rows * s_.ranks;
    OnEach([&](int d) {
      if (x_.size() <= static_cast<size_t>(d)) {
        x_.push_back(Allocate<uint16_t>(rows * s_.k));
        product_.push_back(Allocate<uint16_t>(rows * s_.n));
        Fill<<<512, 256>>>(x_[d], rows * s_.k, 5, false);
        Check(cudaDeviceSynchronize());
      }
      const MatmulShape shape{ElementType::kBF16, s_.transposed, 1, rows, s_.n, s_.k, 0, 0};
      Matmul::Of(d, shape).Enqueue(x_[d], calls_[d].ws[0], product_[d], gpus[d].workspace,
                                   gpus[d].stream);
    });
  }

 private:
  template <class T>
  T* Allocate(size_t items) {
    void* at;
    Check(cudaMalloc(&at, items * sizeof(T)));
    allocated_.push_back(at);
    return static_cast<T*>(at);
  }

  const Sizes s_;
  const MatmulPlan plan_;
  std::vector<MatmulCall> calls_;
  size_t scratch_bytes_ = 0;
  std::vector<uint16_t*> x_, product_;
  std::vector<void*> allocated_;
};

// Milliseconds per call, after running for `settle_ms`, or after a pause.
template <class Enqueue>
double Time(int settle_ms, Enqueue&& enqueue) {
  constexpr int kCalls = 12;
  using Clock = std::chrono::steady_clock;
  const auto settled = Clock::now() + std::chrono::milliseconds(settle_ms);
  if (settle_ms == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  while (Clock::now() < settled) {
    for (int i = 0; i < kCalls; ++i) enqueue();
    Synchronize();
  }
  for (int i = 0; i < 2; ++i) enqueue();
  OnEach([&](int d) { Check(cudaEventRecord(gpus[d].begin, gpus[d].stream)); });
  for (int i = 0; i < kCalls; ++i) enqueue();
  OnEach([&](int d) { Check(cudaEventRecord(gpus[d].end, gpus[d].stream)); });
  Synchronize();
  float longest = 0;
  OnEach([&](int d) {
    float ms;
    Check(cudaEventElapsedTime(&ms, gpus[d].begin, gpus[d].end));
    longest = std::max(longest, ms);
  });
  return longest / kCalls;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// One way of computing a call, as the command line names it.
struct Way {
  MatmulPlan plan;
  // cuBLASLt computes the weight gradient after the call. A matmul of the same size stands for it.
  bool wgrad_after = false;
};

// Sets a field by its name. False if there is no such field.
bool SetPlanField(const std::string& name, int32_t value, MatmulPlan* plan) {
  const auto set = [&](const auto& field) {
    if (name != field.name) return false;
    plan->*field.member = static_cast<std::decay_t<decltype(plan->*field.member)>>(value);
    return true;
  };
  return std::apply([&](const auto&... field) { return (set(field) || ...); }, kPlanFields);
}

// Sets "name=value,name=value". False if it is none.
bool SetFields(const std::string& text, MatmulPlan* plan, bool* wgrad_after = nullptr) {
  std::stringstream fields(text);
  for (std::string field; std::getline(fields, field, ',');) {
    const size_t equals = field.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = field.substr(0, equals);
    const int value = std::atoi(field.c_str() + equals + 1);
    if (name == "wgrad_after" && wgrad_after != nullptr) {
      *wgrad_after = value != 0;
    } else if (!SetPlanField(name, value, plan)) {
      return false;
    }
  }
  return true;
}

int CheckAll(int ranks) {
  int operations = 0, bad = 0;
  for (const Sizes& s : {Sizes{false, ranks, 1, 2048, 1024, 1024, false, false},
                         Sizes{false, ranks, 1, 1000, 520, 776, true, true},
                         Sizes{false, ranks, 3, 200, 264, 136, false, true},
                         Sizes{false, ranks, 1, 127, 8, 8, false, true},
                         Sizes{true, ranks, 1, 2048, 512, 1024, false, false},
                         Sizes{true, ranks, 1, 1000, 520, 776, false, false},
                         Sizes{true, ranks, 3, 200, 264, 136, true, false},
                         Sizes{true, ranks, 2, 129, 72, 1032, false, false},
                         Sizes{true, ranks, 1, 1, 8, 8, false, false},
                         Sizes{false, ranks, 1, 1024, 1024, 512, true, false, true},
                         Sizes{false, ranks, 1, 1000, 520, 776, true, false, true},
                         Sizes{false, ranks, 3, 200, 264, 136, true, false, true},
                         Sizes{false, ranks, 2, 127, 8, 8, true, false, true},
                         Sizes{true, ranks, 1, 1024, 512, 1024, true, false, true},
                         Sizes{true, ranks, 1, 1000, 520, 776, true, false, true},
                         Sizes{true, ranks, 3, 200, 264, 136, true, false, true},
                         Sizes{true, ranks, 2, 129, 72, 1032, true, false, true}}) {
    for (const int columns : kTileColumns) {
      if (!HasFusedKernel(s.algorithm(), columns, s.wgrad)) continue;
      for (const char* fields :
           {"band_pairs=8",
            "band_pairs=2,parts=3,rounds=2,row_pairs_before_wgrad=3,"
            "wgrad_tiles_last=2",
            "band_pairs=3,parts=16,row_pairs_before_wgrad=1,wgrad_tiles_last=9",
            "direct=1,rounds=3", "direct=1,band_pairs=3,parts=3"}) {
        MatmulPlan plan;
        SetFields(fields, &plan);
        plan.tile_columns = columns;
        plan.wgrad = s.wgrad;
        if (plan.direct && !s.reduce_scatter) continue;
        Call call(s, plan, true);
        const unsigned wrong = call.Wrong() + call.Wrong();
        ++operations;
        if (wrong == 0) continue;
        ++bad;
        std::printf("%s, %d x %d rows, K %d, N %d, %s: %u wrong\n", OperationName(s.algorithm()),
                    s.outer, s.rows, s.k, s.n, ToString(plan).c_str(), wrong);
      }
    }
  }
  std::printf("%d ranks: %d operations, %d wrong\n", ranks, operations, bad);
  return bad != 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int ranks = argc > 2 ? std::atoi(argv[1]) : 0;
  if (ranks < 2 || ranks > kMaxRanks) {
    std::printf("see the head of fused_probe.cu\n");
    return 2;
  }
  Open(ranks);
  const std::string operation = argv[2];
  if (operation == "check") return CheckAll(ranks);
  const bool reduce_scatter = operation == "matmul_reduce_scatter";
  int m, k, n, settle_ms = 0;
  double link_gb_s = 385;
  if (argc < 5 || std::sscanf(argv[3], "%d,%d,%d,%d,%lf", &m, &k, &n, &settle_ms, &link_gb_s) < 3)
    return 2;
  if (m % ranks != 0) {
    std::printf("M is %d; it must be a multiple of %d\n", m, ranks);
    return 2;
  }
  std::vector<Way> ways;
  std::vector<std::unique_ptr<Call>> calls;
  const auto sizes_of = [&](const Way& way) {
    const bool transposed = way.plan.wgrad || way.wgrad_after;
    const bool gathered = way.wgrad_after && !reduce_scatter;
    return Sizes{reduce_scatter, ranks, 1, m / ranks, k, n, transposed, gathered, way.plan.wgrad};
  };
  for (int i = 4; i < argc; ++i) {
    Way way;
    const bool known = SetFields(argv[i], &way.plan, &way.wgrad_after);
    const Sizes sizes = sizes_of(way);
    if (!known || !way.plan.fused() || !IsValid(sizes.algorithm(), way.plan) ||
        (way.plan.wgrad && way.wgrad_after)) {
      std::printf("no kernel for %s; the fields are %s,wgrad_after=0\n", argv[i],
                  ToString(MatmulPlan{}).c_str());
      return 2;
    }
    ways.push_back(way);
    calls.push_back(std::make_unique<Call>(sizes, way.plan, false));
  }
  // In both directions, so that no plan always follows the one that leaves the GPU coolest.
  std::vector<double> alone;
  std::map<size_t, std::vector<double>> times;
  for (int round = 0; round < 4; ++round) {
    alone.push_back(Time(settle_ms, [&] { calls[0]->EnqueueMatmul(); }));
    for (size_t i = 0; i < calls.size(); ++i) {
      const size_t at = round % 2 == 0 ? i : calls.size() - 1 - i;
      times[at].push_back(Time(settle_ms, [&] {
        calls[at]->Enqueue();
        if (ways[at].wgrad_after) calls[at]->EnqueueMatmul();
      }));
    }
  }
  const double bytes = (ranks - 1.) / ranks * m * (reduce_scatter ? n : k) * 2;
  for (size_t i = 0; i < ways.size(); ++i) {
    const Way& way = ways[i];
    const unsigned wrong = Call(sizes_of(way), way.plan, true).Wrong();
    const double ms = Median(times[i]);
    const int matmuls = way.plan.wgrad || way.wgrad_after ? 2 : 1;
    const double bound = std::max(matmuls * Median(alone), bytes / link_gb_s / 1e6);
    std::printf(
        "%-22s %d ranks %6d %6d %6d  %s%s: %8.4f ms, share %.3f, matmul alone %.4f, #wrong %u\n",
        operation.c_str(), ranks, m, k, n, ToString(way.plan).c_str(),
        way.wgrad_after ? ",wgrad_after=1" : "", ms, bound / ms, Median(alone), wrong);
  }
}
