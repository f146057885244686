// The kernels of few_rows.h, and their launch.
#include <string>
#include <type_traits>

#include "../kernels/few_rows.h"
#include "../kernels/same_operation.h"
#include "device_thread.h"
#include "few_rows.h"
#include "hopper.h"
#include "slab.h"
#include "tensor_map.h"

namespace jax_intranode {
namespace {

using namespace hopper;

constexpr int kThreads = 128;   // a warpgroup
constexpr int kMaxTakers = 32;  // blocks of the second kernel
constexpr int kBoxBytes = kTileDepth * kFewRowsColumns * 2;
constexpr int kPitch = kFewRowsColumns + 8;  // floats of a row of a part

struct FewRowsParams {
  CUtensorMap x, w;
  DeviceGroup group;  // of no rank if there is no sum
  char* y;
  int m, n, chunks;  // chunks of kTileDepth elements of K
  int split, stages;
  int inverse;  // of split, in 1024ths, rounded up: divides numbers of rows
  int takers;   // blocks of the second kernel
};

// Shared memory, for kernels of `rows` rows: stages of a chunk of w and of x, each with a barrier,
// and the parts of the rows that this block finishes. Row i belongs to block i % split of a
// cluster.
constexpr int kAlignment = 1024;
__host__ __device__ constexpr int OwnRows(int rows, int split) {
  return (rows + split - 1) / split;
}
__host__ __device__ constexpr int StageBytes(int rows) { return kBoxBytes + rows * kTileDepth * 2; }
__host__ __device__ constexpr int BarrierBytes(int stages) { return (stages + 1) / 2 * 16; }
constexpr int SharedBytes(int rows, int split, int stages) {
  return kAlignment + stages * StageBytes(rows) + BarrierBytes(stages) +
         split * OwnRows(rows, split) * kPitch * static_cast<int>(sizeof(float));
}

// The product is computed transposed: columns of w are the rows of a matrix instruction, and kRows
// rows of x its columns.
template <class Type, int kRows>
__global__ void __launch_bounds__(kThreads)
    jax_intranode_few_rows(const __grid_constant__ FewRowsParams p) {
  extern __shared__ char memory[];
  const uint32_t first = (SharedAddress(memory) + kAlignment - 1) / kAlignment * kAlignment;
  const uint32_t barriers = first + p.stages * StageBytes(kRows);
  const uint32_t sums = barriers + BarrierBytes(p.stages);
  const auto full = [&](int stage) { return barriers + stage * 8; };
  const int thread = threadIdx.x, part = static_cast<int>(RankInCluster());
  const int column = static_cast<int>(blockIdx.x) / p.split * kFewRowsColumns;
  const int count = (p.chunks - part + p.split - 1) / p.split;
  const bool sends = p.group.size > 0;

  const auto load = [&](int c, int stage) {
    if (thread != 0) return;
    const int k = (c * p.split + part) * kTileDepth;
    const uint32_t to = first + stage * StageBytes(kRows);
    BarrierExpect(full(stage), StageBytes(kRows));
    hopper::Load(to, p.w, column, k, 0, full(stage));
    hopper::Load(to + kBoxBytes, p.x, k, 0, 0, full(stage));
  };
  if (thread == 0) {
    for (int stage = 0; stage < p.stages; ++stage) BarrierInit(full(stage), 1);
    BarrierInitFence();
  }
  for (int c = 0; c < min(p.stages, count); ++c) load(c, c);
  __syncthreads();  // the barriers are initialised

  uint32_t epoch = 0, was_busy = 0, closed = 0;
  if (sends) {
    RegionHeader* const h = p.group.Header();
    epoch = Load(&h->epoch[0]);
    closed = Load(&h->closed);
    if (blockIdx.x == 0 && thread < p.takers) was_busy = Exchange(&h->busy[thread], 1);
    if (count <= p.stages) LetNextKernelStart();
  }
  if (p.split > 1) ClusterArrive();  // this block's memory may be written

  float d[kRows / 2] = {};
  for (int c = 0, stage = 0, parity = 0; c < count; ++c) {
    BarrierWait(full(stage), parity);
    const uint32_t at = first + stage * StageBytes(kRows);
    const uint32_t left = TileDescriptor(at), right = TileDescriptor(at + kBoxBytes);
    MatmulFence();
    JIN_UNROLL
    for (int i = 0; i < kTileDepth / 16; ++i) {
      Matmul16<std::is_same_v<Type, BF16>, true, false>(d, left + 128 * i, right + 2 * i);
    }
    MatmulCommit();
    if (c > 0 && c - 1 + p.stages < count) {
      MatmulWait<1>();
      __syncthreads();  // all warps have read the stage before
      load(c - 1 + p.stages, (stage == 0 ? p.stages : stage) - 1);
      if (sends && c + p.stages == count) LetNextKernelStart();
    }
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  MatmulWait<0>();
  MatmulDone(d);

  if (p.split > 1) ClusterWait();
  const int own_rows = OwnRows(kRows, p.split), warp = thread / 32, lane = thread % 32;
  JIN_UNROLL
  for (int i = 0; i < kRows / 2; ++i) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, n = warp * 16 + i / 2 % 2 * 8 + lane / 4;
    if (row >= p.m) continue;
    const int own_row = row * p.inverse >> 10;  // row / split, up to row 63
    const int at = (part * own_rows + own_row) * kPitch + n;
    StoreToCluster(sums + at * sizeof(float), row - own_row * p.split, __float_as_uint(d[i]));
  }
  if (p.split > 1) {
    ClusterSync();
  } else {
    __syncthreads();
  }

  if (sends) DeviceThread(p.group, Algorithm::kFewRows).Admit(was_busy, closed);
  constexpr int kPacks = kFewRowsColumns / 8;
  const float* const parts = reinterpret_cast<float*>(memory + (sums - SharedAddress(memory)));
  const int row_packs = p.n / 8;
  const size_t slot_bytes = static_cast<size_t>(p.m) * row_packs * sizeof(Pack);
  for (int e = thread; e < own_rows * kPacks; e += kThreads) {
    const int row = e / kPacks * p.split + part, pack = column / 8 + e % kPacks;
    if (row >= p.m || pack >= row_packs) continue;
    float sum[8] = {};
    for (int q = 0; q < p.split; ++q) {
      const float* const from = parts + (q * own_rows + e / kPacks) * kPitch + e % kPacks * 8;
      float v[8];
      memcpy(v, __builtin_assume_aligned(from, 16), sizeof v);
      JIN_UNROLL
      for (int i = 0; i < 8; ++i) sum[i] = q == 0 ? v[i] : sum[i] + v[i];
    }
    Pack y;
    JIN_UNROLL
    for (int i = 0; i < 4; ++i) y.word[i] = Type::RoundPair(sum[2 * i], sum[2 * i + 1]);
    const size_t i = static_cast<size_t>(row) * row_packs + pack;
    if (sends) {
      FewRows<Type, 0>::Send(p.group, epoch, slot_bytes, i, y);
    } else {
      reinterpret_cast<Pack*>(p.y)[i] = y;
    }
  }
}

// The first kernel has marked the operation as begun, and has looked whether the region is closed.
class TakingThread : public DeviceThread {
 public:
  using DeviceThread::DeviceThread;
  __device__ void Enter(uint32_t*, uint32_t*) {}
};

template <class Type, int N>
__global__ void __launch_bounds__(kMaxThreads)
    jax_intranode_few_rows_sum(const __grid_constant__ DeviceGroup group,
                               const __grid_constant__ AlignedBuffer call) {
  TakingThread thread(group, Algorithm::kFewRows);
  if (thread.IsCheckBlock()) {
    CheckSameOperation(thread, group);
    return;
  }
  const uint32_t epoch = Begin(thread, group);
  FewRows<Type, N>::Take(thread, group, call, epoch);
  AwaitKernelAhead();
  End(thread, group, epoch);
}

// The kernels.

void Check(cudaError_t status) { ThrowIfError(status, "loading the kernels of few rows"); }

void Launch(const char* what, const cudaLaunchConfig_t& config, const void* kernel,
            void** arguments) {
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel, arguments);
  if (status == cudaSuccess) return;
  const auto text = [](size_t number) { return std::to_string(number); };
  ThrowIfError(status, std::string("launching ") + what + " of few rows, " +
                           text(config.gridDim.x) + " blocks of " + text(config.blockDim.x) +
                           " threads with " + text(config.dynamicSmemBytes) +
                           " bytes of shared memory,");
}

template <class With>
const void* OfType(ElementType type, const With& with) {
  return type == ElementType::kBF16 ? with(BF16{}) : with(F16{});
}

// The rows of the kernel that multiplies m rows.
int RowsOf(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : 64; }

const void* ProductKernel(ElementType type, int rows) {
  return OfType(type, [rows](auto of) -> const void* {
    using Type = decltype(of);
    return rows == 16   ? reinterpret_cast<const void*>(&jax_intranode_few_rows<Type, 16>)
           : rows == 32 ? reinterpret_cast<const void*>(&jax_intranode_few_rows<Type, 32>)
                        : reinterpret_cast<const void*>(&jax_intranode_few_rows<Type, 64>);
  });
}

const void* SumKernel(ElementType type, int size) {
  return OfType(type, [size](auto of) -> const void* {
    using Type = decltype(of);
    return size == 2 ? reinterpret_cast<const void*>(&jax_intranode_few_rows_sum<Type, 2>)
                     : reinterpret_cast<const void*>(&jax_intranode_few_rows_sum<Type, 0>);
  });
}

// The shared memory of a block, if so many share an SM. The second kernel's blocks have room
// beside them.
constexpr int SharedBytesOf(int blocks_per_sm) {
  constexpr int kOfSm = 228 << 10, kOfBlock = 1 << 10;  // what a block takes besides its own
  return (kOfSm - 2 * kOfBlock) / blocks_per_sm / 1024 * 1024 - kOfBlock;
}

static_assert(SharedBytes(kMostFewRows, 8, 2) <= SharedBytesOf(2));  // at least two stages

void LaunchProduct(const FewRowsCall& call, FewRowsParams* p, const FewRowsPlan& plan,
                   cudaStream_t stream) {
  const auto m = static_cast<uint64_t>(call.m), k = static_cast<uint64_t>(call.k);
  const auto n = static_cast<uint64_t>(call.n);
  const int rows = RowsOf(call.m);
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_NONE;
  p->x = TensorMap(call.type, call.x, {k, m, 1}, {kTileDepth, static_cast<uint32_t>(rows), 1}, k);
  p->w = TensorMap(call.type, call.w, {n, k, 1}, {kFewRowsColumns, kTileDepth, 1}, n, kPromotion);
  p->chunks = static_cast<int>(DivideUp(call.k, kTileDepth));
  p->split = plan.split;
  p->inverse = static_cast<int>(DivideUp(1024, plan.split));
  p->stages = static_cast<int>(DivideUp(p->chunks, plan.split));
  while (SharedBytes(rows, plan.split, p->stages) > SharedBytesOf(plan.blocks_per_sm)) {
    --p->stages;
  }
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(plan.split), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(DivideUp(call.n, kFewRowsColumns) * plan.split);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = SharedBytes(rows, plan.split, p->stages);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  void* arguments[] = {p};
  Launch("a matmul", config, ProductKernel(call.type, rows), arguments);
}

}  // namespace

void LaunchFewRows(const FewRowsCall& call, const FewRowsPlan& plan, const DeviceGroup* group,
                   cudaStream_t stream) {
  FewRowsParams p = {};
  p.y = static_cast<char*>(call.y);
  p.m = static_cast<int>(call.m);
  p.n = static_cast<int>(call.n);
  // Each thread of the second kernel takes a pack, if there are enough.
  const size_t bytes = 2 * call.m * call.n, packs = PacksOf(bytes);
  const int threads = packs <= kMaxTakers * 256 ? 256 : kMaxThreads;
  p.takers = static_cast<int>(std::min<size_t>((packs + threads - 1) / threads, kMaxTakers));
  if (group != nullptr) p.group = *group;
  LaunchProduct(call, &p, plan, stream);
  if (group == nullptr) return;

  p.group.type = call.type;
  const uint64_t digest = static_cast<uint64_t>(call.type) + 16 * (call.m + 128 * call.k);
  p.group.operation = OperationWordOfDigest(Algorithm::kFewRows, digest * 1000003 + call.n);
  AlignedBuffer sum{nullptr, call.y, bytes};
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = p.takers + kCheckBlocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  void* arguments[] = {&p.group, &sum};
  Launch("the sum of a matmul", config, SumKernel(call.type, group->size), arguments);
}

void LoadFewRowsKernels() {
  int device, major;
  Check(cudaGetDevice(&device));
  Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != kFusedComputeCapability) return;
  for (const ElementType type : {ElementType::kBF16, ElementType::kF16}) {
    for (const int rows : {16, 32, 64}) {
      Check(cudaFuncSetAttribute(ProductKernel(type, rows),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytesOf(1)));
    }
    for (const int size : {0, 2}) {
      cudaFuncAttributes attributes;
      Check(cudaFuncGetAttributes(&attributes, SumKernel(type, size)));
    }
  }
}

}  // namespace jax_intranode
