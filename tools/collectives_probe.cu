// Checks and times the kernels of the collectives (xla_ffi/cuda/collectives.h) without XLA:
// bfloat16, in one epoch and in segments (xla_ffi/kernels/segments.h).
//
// Rank r is GPU r. With fewer GPUs than ranks, all ranks are streams of GPU 0. Then results count,
// and so do the costs of a kernel itself, but not times: nothing travels over a link.
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a
//       -o collectives_probe tools/collectives_probe.cu
//       xla_ffi/cuda/{kernels_bare.cu,collectives.cc,slab.cu} -ldl
//   ./collectives_probe RANKS check
//   ./collectives_probe 8 check-mesh
//   ./collectives_probe RANKS check-other
//   ./collectives_probe RANKS OPERATION BYTES SEGMENT_BYTES ... [BLOCKSxTHREADS]
//   ./collectives_probe RANKS OPERATION BYTES alone [BLOCKSxTHREADS]
//
// "check" runs operations of many sizes after each other, with random delays of each rank, in place
// and not: sums, maxima, minima, copies, and permutes, which have regions of their own.
// "check-mesh" does so with the ranks as a hybrid cube mesh: a rank has no address of the regions
// of those that it is not linked to. "check-other" launches a kernel with more blocks than fit on
// the GPU, whose peer runs another operation: it must find that, and not time out. The fourth form
// times psum, psum_scatter, all_gather or all_to_all of BYTES (of the larger of operand and result)
// in segments of at most SEGMENT_BYTES (of an operand; of psum_scatter's result; of what all_to_all
// sends to each peer); 0: in one epoch. A line says the microseconds of an operation, the bytes per
// second that each rank sends, and the number of wrong elements. The launch shape is that of the
// table, or what fits on a shared GPU. "alone" times the kernel of one rank, with its whole grid,
// whose peers have sent everything.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../xla_ffi/cuda/collectives.h"
#include "../xla_ffi/cuda/launch.h"
#include "../xla_ffi/cuda/slab.h"
#include "../xla_ffi/ffi/members.h"
#include "../xla_ffi/kernels/same_operation.h"

namespace jax_intranode {

// The probe has only the kernels that it runs.
const void* FlaggedKernel(Algorithm, ElementType, int, CallKind, bool) { return nullptr; }
const void* FlaggedPermuteKernel(bool) { return nullptr; }
const void* RaggedKernel(bool, bool) { return nullptr; }
const void* ExpertsKernel(Algorithm, ElementType, int) { return nullptr; }
const void* NormKernel(ElementType, int, bool) { return nullptr; }

}  // namespace jax_intranode

using namespace jax_intranode;

namespace {

constexpr size_t kEpochBufferBytes = size_t{24} << 20;
constexpr ElementType kType = ElementType::kBF16;

void Check(cudaError_t status) { ThrowIfError(status, "collectives_probe"); }

// Element i of rank r's operand: an integer, so that sums are exact.
__device__ float Value(int rank, size_t i, uint32_t seed) {
  uint32_t x = static_cast<uint32_t>(i * 2654435761u) ^ static_cast<uint32_t>(i >> 32) * 97u;
  x = (x + rank * 40503u + seed) * 0x7feb352d;
  return static_cast<float>(static_cast<int>((x >> 16) % 17) - 8);
}
__device__ uint16_t Bits(float value) { return __float_as_uint(value) >> 16; }  // exact ones

// The same for maxima and minima, which have zeros of both signs and a few NaN.
__device__ float Extremal(int rank, size_t i, uint32_t seed) {
  const float value = Value(rank, i, seed);
  if (value == 1) return -0.0f;
  return value == 8 && (i + rank) % 5 == 0 ? __uint_as_float(0x7FC00000) : value;
}
__device__ float ExtremeOf(bool max, float a, float b) {
  if (isnan(a) || isnan(b)) return __uint_as_float(0x7FC00000);
  const bool a_is_larger = a > b || (a == b && !signbit(a));
  return a_is_larger == max ? a : b;
}

__global__ void Fill(uint16_t* to, size_t count, int rank, uint32_t seed, bool sums) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = Bits(sums ? Value(rank, i, seed) : Extremal(rank, i, seed));
  }
}

// Counts the wrong elements of a rank's result. `shard`: elements of a shard.
__global__ void Compare(Algorithm algorithm, Reduction reduction, const uint16_t* result,
                        size_t count, size_t shard, int rank, int ranks, uint32_t seed,
                        unsigned long long* wrong) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    float want = 0;
    if (reduction != Reduction::kSum) {
      want = Extremal(0, i, seed);
      for (int r = 1; r < ranks; ++r) {
        want = ExtremeOf(reduction == Reduction::kMax, want, Extremal(r, i, seed));
      }
      const bool is_nan = (result[i] & 0x7FFF) > 0x7F80;
      if (isnan(want) ? !is_nan : result[i] != Bits(want)) atomicAdd(wrong, 1ull);
      continue;
    }
    const bool divides =
        algorithm == Algorithm::kReduceScatter || algorithm == Algorithm::kAllToAll;
    const size_t at = (divides ? rank * shard : 0) + i % shard;
    if (algorithm == Algorithm::kAllGather || algorithm == Algorithm::kAllToAll) {
      want = Value(static_cast<int>(i / shard), at, seed);
    } else {
      for (int r = 0; r < ranks; ++r) want += Value(r, at, seed);
    }
    if (result[i] != Bits(want)) atomicAdd(wrong, 1ull);
  }
}

// The same for a member of a permute, which begins at element `begin` of a rank's buffers.
__global__ void ComparePermuted(const uint16_t* result, size_t begin, size_t count, int source,
                                uint32_t seed, unsigned long long* wrong) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const float want = source < 0 ? 0 : Value(source, begin + i, seed);
    if (result[begin + i] != Bits(want)) atomicAdd(wrong, 1ull);
  }
}

__global__ void Delay(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

// Tells rank 0 what the rank of a group runs in rank 0's next operation.
__global__ void Tell(const __grid_constant__ DeviceGroup group) {
  auto* const header = reinterpret_cast<RegionHeader*>(group.region[0]);
  TellOperation(group, 0, Load(&header->operations));
}

struct Operation {
  Algorithm algorithm;
  size_t elements;  // of the operand; of a reduce-scatter's result, of a part of an all-to-all
  uint32_t segments;
  LaunchShape shape;
  size_t buffers = 1;  // of an all-reduce or a permute: pieces of one buffer
  bool in_place = false;
  size_t shift = 0;  // elements between the buffers' beginning and an aligned address
  // Of a permute: of each piece the source of each rank, or -1.
  std::vector<std::vector<int>> sources = {};

  // Calls `with(first element, elements)` for each piece. The last ones may be missing.
  template <class With>
  void ForEachPiece(With with) const {
    const size_t each = (elements + buffers - 1) / buffers;
    for (size_t begin = 0; begin < elements; begin += each) {
      with(begin, std::min(each, elements - begin));
    }
  }
};

class Probe {
 public:
  Probe(int count, bool mesh) : groups_(count), permuting_(count), ranks_(count) {
    int gpus;
    Check(cudaGetDeviceCount(&gpus));
    shared_ = gpus < count;
    for (int r = 0; r < count; ++r) {
      ranks_[r].device = shared_ ? 0 : r;
      Check(cudaSetDevice(ranks_[r].device));
      for (int peer = 0; peer < count && !shared_; ++peer) {
        if (peer != r) EnablePeerAccess(r, peer);
      }
      Check(cudaStreamCreateWithFlags(&ranks_[r].stream, cudaStreamNonBlocking));
      Check(cudaEventCreate(&ranks_[r].begin));
      Check(cudaEventCreate(&ranks_[r].end));
      for (auto* groups : {&groups_, &permuting_}) {
        void* region;
        Check(cudaMalloc(&region, kHeaderBytes + 2 * kEpochBufferBytes));
        Check(cudaMemset(region, 0, kHeaderBytes));
        Check(cudaMemset(static_cast<char*>(region) + kHeaderBytes, 0xFF, 2 * kEpochBufferBytes));
        for (DeviceGroup& group : *groups) group.region[r] = static_cast<char*>(region);
      }
      DeviceGroup& group = groups_[r];
      group.epoch_buffer_bytes = kEpochBufferBytes;
      group.rank = r;
      group.size = count;
      Check(cudaHostAlloc(&group.failure, sizeof(FailureRecord), cudaHostAllocPortable));
      memset(static_cast<void*>(group.failure), 0, sizeof(FailureRecord));
      group.timeout_ns = 20'000'000'000;
      group.site = 0;
      DeviceGroup permuting = group;
      std::copy(permuting_[r].region, permuting_[r].region + kMaxRanks, permuting.region);
      permuting_[r] = permuting;
      // A kernel that is loaded while another one spins might wait for it.
      Check(LoadListedKernels());
      Check(cudaDeviceSynchronize());
    }
    if (mesh) LinkAsMesh();
  }

  int count() const { return static_cast<int>(ranks_.size()); }
  bool shared() const { return shared_; }

  // The blocks of so many threads that may be launched on each rank, for one aligned buffer or for
  // any buffers.
  int MostBlocks(Algorithm algorithm, int threads, bool any) const {
    if (!shared_) return kMaxBlocks;
    int of_one_sm, sms, least = kMaxBlocks;
    Check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    for (const bool in_segments : {false, true}) {
      for (const CallKind kind : {CallKind::kAligned, CallKind::kAny, CallKind::kMany}) {
        if (kind != CallKind::kAligned && !any) continue;
        const void* kernel = algorithm == Algorithm::kPermute
                                 ? BarePermuteKernel(kind == CallKind::kAligned)
                                 : BareKernel(algorithm, kType, count(), kind, in_segments);
        if (kernel == nullptr) continue;
        Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one_sm, kernel, threads, 0));
        least = std::min(least, of_one_sm * sms / count() - 2);  // one of them for the check
      }
    }
    return least;
  }

  // Runs operations `calls` times after each other, with delays of up to `delay` cycles. Returns
  // microseconds of all of them, on the slowest rank, and the number of wrong elements.
  std::pair<double, unsigned long long> Run(const std::vector<Operation>& operations, int calls,
                                            long long delay) {
    static uint32_t seed = 0;
    seed += 12345;
    std::vector<std::vector<uint16_t*>> in(count()), out(count());
    unsigned long long all_wrong = 0;
    for (int r = 0; r < count(); ++r) {
      Check(cudaSetDevice(ranks_[r].device));
      for (const Operation& o : operations) {
        const size_t ins = o.elements * InputShards(o.algorithm, count());
        const size_t outs = o.elements * OutputShards(o.algorithm, count());
        in[r].push_back(Allocate(ins + o.shift) + o.shift);
        Fill<<<256, 256, 0, ranks_[r].stream>>>(in[r].back(), ins, r, seed,
                                                ReductionOf(o.algorithm) == Reduction::kSum);
        out[r].push_back(o.in_place ? in[r].back() : Allocate(outs + o.shift) + o.shift);
        if (!o.in_place) {
          Check(cudaMemsetAsync(out[r].back(), 0xFF, 2 * outs, ranks_[r].stream));
        }
      }
      Check(cudaStreamSynchronize(ranks_[r].stream));
    }
    static std::mt19937 random(1);
    for (int k = -1; k < calls; ++k) {  // the first call lets the ranks get in step
      for (size_t i = 0; i < operations.size(); ++i) {
        const Operation& o = operations[i];
        for (int r = 0; r < count(); ++r) {
          Check(cudaSetDevice(ranks_[r].device));
          if (k == 0 && i == 0) Check(cudaEventRecord(ranks_[r].begin, ranks_[r].stream));
          if (delay > 0) Delay<<<1, 1, 0, ranks_[r].stream>>>(random() % delay);
          Enqueue(o, r, in[r][i], out[r][i]);
        }
      }
    }
    for (Rank& rank : ranks_) {
      Check(cudaSetDevice(rank.device));
      Check(cudaEventRecord(rank.end, rank.stream));
    }
    Synchronize();
    double us = 0;
    for (int r = 0; r < count(); ++r) {
      Check(cudaSetDevice(ranks_[r].device));
      float ms = 0;
      if (calls > 0) Check(cudaEventElapsedTime(&ms, ranks_[r].begin, ranks_[r].end));
      us = std::max(us, ms * 1e3);
      for (size_t i = 0; i < operations.size(); ++i) {
        const Operation& o = operations[i];
        const size_t outs = o.elements * OutputShards(o.algorithm, count());
        unsigned long long *wrong, found = 0;
        Check(cudaMalloc(&wrong, sizeof found));
        Check(cudaMemset(wrong, 0, sizeof found));
        // In place, further calls sum sums: only the first one is checked.
        if (o.algorithm == Algorithm::kPermute) {
          size_t piece = 0;
          o.ForEachPiece([&](size_t begin, size_t elements) {
            ComparePermuted<<<256, 256>>>(out[r][i], begin, elements, o.sources[piece++][r], seed,
                                          wrong);
          });
        } else {
          Compare<<<256, 256>>>(o.algorithm, ReductionOf(o.algorithm), out[r][i], outs, o.elements,
                                r, count(), seed, wrong);
        }
        Check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
        Check(cudaFree(wrong));
        all_wrong += found;
      }
    }
    all_wrong += BytesLeft();
    for (uint16_t* at : allocated_) Check(cudaFree(at));
    allocated_.clear();
    return {us, all_wrong};
  }

  // Launches a psum on rank 0 with all blocks of a large message, while rank 1 tells of another
  // operation and nobody sends. Returns why the kernel gave up.
  FailureReason MeetOther() {
    DeviceGroup& waits = groups_[0];
    waits.timeout_ns = 3'000'000'000;
    DeviceGroup other = groups_[1];
    other.operation = OperationWord(Algorithm::kAllGather, kType, 40);
    Check(cudaSetDevice(ranks_[1].device));
    Tell<<<1, 1, 0, ranks_[1].stream>>>(other);
    Check(cudaStreamSynchronize(ranks_[1].stream));
    Check(cudaSetDevice(ranks_[0].device));
    const size_t elements = size_t{3} << 20;        // of three ranks each thread has some
    uint16_t* const data = Allocate(elements + 1);  // not aligned: the kernel with most registers
    const LaunchShape shape{kMaxBlocks, kMaxThreads};
    Enqueue({Algorithm::kTwoShot, elements, 1, shape}, 0, data + 1, data + 1);
    const cudaError_t status = cudaStreamSynchronize(ranks_[0].stream);
    printf("%s\n", cudaGetErrorString(status));
    return static_cast<FailureReason>(waits.failure->reason);
  }

  // Microseconds of an operation of one epoch on rank 0, whose peers have sent all their packets
  // before it begins: what its kernel costs with the grid that it has on a GPU of its own.
  double Alone(const Operation& o) {
    uint16_t* const in = Allocate(o.elements * InputShards(o.algorithm, count()));
    uint16_t* const out = Allocate(o.elements * OutputShards(o.algorithm, count()));
    Rank& rank = ranks_[0];
    std::vector<float> ms(20);
    for (float& t : ms) {
      Check(cudaMemsetAsync(groups_[0].region[0] + kHeaderBytes, 0, 2 * kEpochBufferBytes,
                            rank.stream));
      for (int r = 1; r < count(); ++r) {
        DeviceGroup peer = groups_[r];
        peer.operation = OperationWord(o.algorithm, kType, 2 * o.elements);
        Tell<<<1, 1, 0, rank.stream>>>(peer);
      }
      Check(cudaEventRecord(rank.begin, rank.stream));
      Enqueue(o, 0, in, out);
      Check(cudaEventRecord(rank.end, rank.stream));
      Check(cudaStreamSynchronize(rank.stream));
      Check(cudaEventElapsedTime(&t, rank.begin, rank.end));
    }
    for (uint16_t* at : allocated_) Check(cudaFree(at));
    allocated_.clear();
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1e3;
  }

 private:
  struct Rank {
    int device;
    cudaStream_t stream;
    cudaEvent_t begin, end;
  };

  // Quads of ranks 0, 3, 5, 6 and 1, 2, 4, 7; a rank's relay is the other one of its pair.
  void LinkAsMesh() {
    const auto quad = [](int r) { return (r ^ r >> 1 ^ r >> 2) & 1; };
    std::vector<Links> links;
    for (int r = 0; r < count(); ++r) {
      links.push_back({0, r ^ 1});
      for (int p = 0; p < count(); ++p) {
        if (p != r && (quad(p) == quad(r) || p == (r ^ 1))) links[r].peers |= 1u << p;
      }
    }
    if (!IsCubeMesh(links)) throw std::logic_error("no hybrid cube mesh");
    for (int r = 0; r < count(); ++r) groups_[r] = WithoutUnlinked(groups_[r], links[r]);
    links_ = links;
  }

  void Enqueue(const Operation& o, int rank, const uint16_t* in, uint16_t* out) {
    const DeviceOperation operation{o.algorithm, kType, o.segments, o.shape};
    const cudaStream_t stream = ranks_[rank].stream;
    if (o.algorithm == Algorithm::kPermute) {
      Permutes members;
      o.ForEachPiece([&](size_t begin, size_t elements) {
        const std::vector<int>& sources = o.sources[members.count];
        const auto to = std::find(sources.begin(), sources.end(), rank);
        members.Append({in + begin, out + begin, 2 * elements}, sources[rank],
                       to == sources.end() ? -1 : static_cast<int>(to - sources.begin()));
      });
      return Check(Launch(operation, permuting_[rank], members, stream));
    }
    Buffers pieces;
    o.ForEachPiece([&](size_t begin, size_t elements) {
      pieces.Append({in + begin, out + begin, 2 * elements});
    });
    Check(links_.empty()
              ? Launch(operation, groups_[rank], pieces, stream)
              : Launch(operation, groups_[rank], LinkedBuffers{pieces, links_[rank]}, stream));
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
    for (const DeviceGroup& group : groups_) {
      if (group.failure->reason == 0) continue;
      printf("rank %d gave up: reason %u, it waited for rank %d\n", group.rank,
             group.failure->reason, group.failure->missing);
    }
    Check(status);
  }

  // Bytes of the epoch buffers that are not empty.
  unsigned long long BytesLeft() {
    unsigned long long left = 0;
    std::vector<char> host(2 * kEpochBufferBytes);
    for (const auto* groups : {&groups_, &permuting_}) {
      for (const DeviceGroup& group : *groups) {
        Check(cudaMemcpy(host.data(), group.region[group.rank] + kHeaderBytes, host.size(),
                         cudaMemcpyDefault));
        left += host.size() - std::count(host.begin(), host.end(), static_cast<char>(0xFF));
      }
    }
    return left;
  }

  std::vector<DeviceGroup> groups_;
  std::vector<DeviceGroup> permuting_;  // the same ranks, with the regions of permutes
  std::vector<Rank> ranks_;
  std::vector<Links> links_;  // of the ranks of a hybrid cube mesh
  std::vector<uint16_t*> allocated_;
  bool shared_;
};

// Into how many segments an operation is cut (jax_intranode/_src/selection/select.py).
uint32_t Segments(Algorithm algorithm, size_t bytes, size_t segment_bytes, int ranks) {
  uint32_t segments = 1;
  while (segment_bytes > 0 && (bytes > segments * segment_bytes ||
                               EpochBufferBytesNeeded(algorithm, kType, PacksOf(bytes), ranks,
                                                      segments) > kEpochBufferBytes)) {
    segments *= 2;
  }
  return segments;
}

// The blocks that have work, at most `most`.
int Blocks(const Operation& o, int ranks, int most) {
  size_t packs = SegmentPacks(o.algorithm, PacksOf(2 * o.elements), ranks, o.segments);
  if (IsTwoShot(o.algorithm)) packs = (packs + ranks - 1) / ranks;
  const size_t blocks = (packs + o.shape.threads - 1) / o.shape.threads;
  return static_cast<int>(std::clamp<size_t>(blocks, 1, most));
}

// The source of each rank, or -1.
std::vector<int> PartialPermutation(int ranks, std::mt19937* random) {
  std::vector<int> sources(ranks);
  for (int r = 0; r < ranks; ++r) sources[r] = r;
  std::shuffle(sources.begin(), sources.end(), *random);
  const uint32_t missing = (*random)() % 4;
  for (int& source : sources) source = (*random)() % 4 < missing ? -1 : source;
  return sources;
}

int CheckAll(Probe& ranks, bool mesh) {
  std::mt19937 random(7);
  unsigned long long all_wrong = 0;
  int operations = 0;
  for (int round = 0; round < 12; ++round) {
    // Of all operations of a round, because ranks on one GPU may be in different ones: many small
    // blocks that wait could leave no SM with room for a large one, for which they wait.
    const int threads = 32 << (random() % 5);
    std::vector<Operation> chosen;
    for (int k = 0; k < 12; ++k) {
      const Algorithm algorithms[] = {
          Algorithm::kOneShot,    Algorithm::kTwoShot,    Algorithm::kReduceScatter,
          Algorithm::kAllGather,  Algorithm::kAllToAll,   Algorithm::kOneShotMax,
          Algorithm::kTwoShotMax, Algorithm::kOneShotMin, Algorithm::kTwoShotMin,
          Algorithm::kPermute,    Algorithm::kPermute,    Algorithm::kPermute};
      Operation o{algorithms[random() % std::size(algorithms)], 0, 1, {1, threads}};
      if (mesh) o.algorithm = Algorithm::kHybridCubeMesh;
      // Small ones between large ones, whole packs and not.
      o.elements =
          random() % 3 == 0 ? 1 + random() % 3000 : 1 + random() % (mesh ? 1500000 : 3000000);
      if (random() % 2 == 0) o.elements = (o.elements + 4095) / 4096 * 4096;
      if (IsAllReduce(o.algorithm) && !mesh && random() % 2 == 0) o.buffers = 2 + random() % 100;
      if (o.algorithm == Algorithm::kPermute) {
        o.buffers = random() % 2 == 0 ? 1 : 1 + random() % kMaxMembers;
        while (o.sources.size() < o.buffers) {
          o.sources.push_back(PartialPermutation(ranks.count(), &random));
        }
      }
      const size_t bytes = 2 * o.elements + 16 * o.buffers;  // each buffer begins a pack
      const size_t segment = size_t{1} << (12 + random() % 10);
      o.segments = !RunsInSegments(o.algorithm) || (random() % 4 == 0 && o.elements < 500000)
                       ? 1
                       : Segments(o.algorithm, bytes, segment, ranks.count());
      o.shape.blocks =
          Blocks(o, ranks.count(), ranks.MostBlocks(o.algorithm, o.shape.threads, true));
      o.shift = random() % 2 == 0 ? 0 : random() % 8;
      chosen.push_back(o);
    }
    all_wrong += ranks.Run(chosen, 3, 100000).second;
    for (Operation& o : chosen) {
      o.in_place = IsAllReduce(o.algorithm) || o.algorithm == Algorithm::kAllToAll ||
                   o.algorithm == Algorithm::kPermute;
    }
    all_wrong += ranks.Run(chosen, 0, 100000).second;
    operations += 2 * static_cast<int>(chosen.size());
  }
  printf("%d ranks%s%s: %d operations, %llu wrong\n", ranks.count(),
         ranks.shared() ? " on one GPU" : "", mesh ? " as a hybrid cube mesh" : "", operations,
         all_wrong);
  return all_wrong != 0;
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // a queue for each stream
  const int count = argc > 2 ? atoi(argv[1]) : 0;
  const std::string what = argc > 2 ? argv[2] : "";
  Algorithm algorithm = what == "psum"           ? Algorithm::kTwoShot
                        : what == "psum_scatter" ? Algorithm::kReduceScatter
                        : what == "all_to_all"   ? Algorithm::kAllToAll
                                                 : Algorithm::kAllGather;
  const bool times = argc > 4 && (what == "psum" || what == "psum_scatter" ||
                                  what == "all_gather" || what == "all_to_all");
  const bool mesh = what == "check-mesh";
  const bool other = what == "check-other";
  if (count < 2 || count > kMaxRanks ||
      (what != "check" && !other && !times && !(mesh && count == 8))) {
    printf("see the head of collectives_probe.cu\n");
    return 2;
  }
  Probe ranks(count, mesh);
  if (what == "check" || mesh) return CheckAll(ranks, mesh);
  if (other) {
    const FailureReason reason = ranks.MeetOther();
    printf("gave up: reason %u\n", static_cast<unsigned>(reason));
    return reason != FailureReason::kOtherOperation;
  }
  const size_t bytes = strtoull(argv[3], nullptr, 10);
  const size_t part = what == "psum" ? bytes : bytes / count;
  LaunchShape shape{kMaxBlocks, kMaxThreads}, asked;
  const bool given = sscanf(argv[argc - 1], "%dx%d", &asked.blocks, &asked.threads) == 2;
  if (given) shape = asked;
  bool all_right = true;
  for (int i = 4; i < argc - (given ? 1 : 0); ++i) {
    if (strcmp(argv[i], "alone") == 0) {
      Operation o{algorithm, part / 2, 1, shape};
      o.shape.blocks = Blocks(o, count, shape.blocks);
      printf("%-12s %d ranks, alone %9zu bytes, %3dx%d: %9.2f us\n", what.c_str(), count, bytes,
             o.shape.blocks, o.shape.threads, ranks.Alone(o));
      continue;
    }
    const size_t segment_bytes = strtoull(argv[i], nullptr, 10);
    // As jax_intranode/_src/selection/select.py.
    if (what == "psum" && count == 2 && segment_bytes > 0) algorithm = Algorithm::kOneShot;
    Operation o{algorithm, part / 2, Segments(algorithm, part, segment_bytes, count), shape};
    if (EpochBufferBytesNeeded(algorithm, kType, PacksOf(part), count, o.segments) >
        kEpochBufferBytes) {
      printf("%zu bytes don't fit an epoch buffer\n", bytes);
      continue;
    }
    const int most = std::min(shape.blocks, ranks.MostBlocks(algorithm, shape.threads, false));
    o.shape.blocks = Blocks(o, count, most);
    const int calls = static_cast<int>(std::clamp<size_t>((size_t{4} << 30) / bytes, 5, 200));
    std::vector<double> us;
    unsigned long long wrong = 0;
    for (int repetition = 0; repetition < 5; ++repetition) {
      const auto [total, found] = ranks.Run({o}, calls, 0);
      us.push_back(total / calls);
      wrong += found;
    }
    std::sort(us.begin(), us.end());
    const double sent = (what == "psum" ? 2.0 : 1.0) * (count - 1) / count * bytes;
    printf("%-12s %d ranks%s %11zu bytes, %4u segments, %3dx%d: %9.2f us, %6.1f GB/s, %llu wrong\n",
           what.c_str(), count, ranks.shared() ? " on one GPU" : "", bytes, o.segments,
           o.shape.blocks, o.shape.threads, us[us.size() / 2], sent / us[us.size() / 2] / 1e3,
           wrong);
    all_right = all_right && wrong == 0;
  }
  return all_right ? 0 : 1;
}
