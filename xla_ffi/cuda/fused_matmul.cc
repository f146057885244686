// The host side of the fused kernel: its parameters and its launch.
#include "fused_matmul.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../text.h"
#include "fused_kernel.h"
#include "fused_params.h"
#include "signals.h"
#include "slab.h"
#include "tensor_map.h"

namespace jax_intranode {
namespace {

void CheckLaunch(cudaError_t status) { ThrowIfError(status, "launching a collective matmul"); }

// Sizes of a call.

int KChunks(const MatmulCall& call) {
  int chunks = 0;
  for (const int64_t k : call.ks) chunks += DivideUp(k, kTileDepth);
  return chunks;
}
int RowTiles(const MatmulCall& call) {
  return static_cast<int>(call.outer) * DivideUp(call.rows, kTileRows);
}
int ColumnTiles(const MatmulCall& call, const MatmulPlan& plan) {
  int tiles = 0;
  for (const int64_t n : call.ns) tiles += DivideUp(n, plan.tile_columns);
  return tiles;
}
// Reduce-scatter: columns of all rounds but the last one.
int64_t ColumnsOfRound(const MatmulCall& call, const MatmulPlan& plan) {
  return int64_t{DivideUp(ColumnTiles(call, plan), plan.rounds)} * plan.tile_columns;
}

// The address of an element.
template <class T>
const void* ElementAt(const T* array, int64_t element) {
  return static_cast<const char*>(static_cast<const void*>(array)) + element * kMatmulElementBytes;
}

// One launch: all columns of a call, or of a reduce-scatter's only product `columns` columns from
// `first` on.
struct Round {
  const MatmulMember& member;
  Algorithm algorithm;
  const MatmulPlan& plan;
  const MatmulCall& call;
  int64_t first, columns;

  bool reduce_scatter() const { return algorithm == Algorithm::kMatmulReduceScatter; }
  int size() const { return member.group.size; }
  // Columns of this launch, and columns before them, in a product.
  int64_t ColumnsOf(size_t product) const { return product == 0 ? columns : call.ns[product]; }
  int64_t ColumnsBefore(size_t product) const { return product == 0 ? first : 0; }
  // The rows of x on this rank, [outer, rows, k].
  CUtensorMap MapOfX(size_t i, std::vector<uint32_t> box) const {
    const uint64_t k = call.ks[i], outer = call.outer * (reduce_scatter() ? size() : 1);
    return TensorMap(call.type, call.xs[i], {k, static_cast<uint64_t>(call.rows), outer},
                     std::move(box), k);
  }
};

void SetSizes(const Round& round, FusedParams* p) {
  const MatmulCall& call = round.call;
  p->rank = round.member.group.rank;
  p->size = round.size();
  p->reduce_scatter = round.reduce_scatter();
  p->row_tiles_per_array = DivideUp(call.rows, kTileRows);
  p->row_tiles = RowTiles(call);
  p->row_pairs = DivideUp(p->row_tiles, kClusterSize);
  p->k_chunks = KChunks(call);
  p->rows = static_cast<int>(call.rows);
  p->row_bytes = static_cast<int>(call.k() * kMatmulElementBytes);
  p->products = static_cast<int>(call.products.size());
  p->wgrads = static_cast<int>(call.wgrads.size());
}

void SetMemory(const Round& round, FusedParams* p) {
  const MatmulMember& member = round.member;
  p->group = member.group;
  std::copy(std::begin(member.ring), std::end(member.ring), p->ring);
  p->data_offset = RingDataOffset(member.ring_bytes);
  p->scratch = static_cast<char*>(round.call.scratch);
  p->x = static_cast<const char*>(round.call.x());
  p->gathered = static_cast<char*>(round.call.gathered);
}

void SetMatrices(const Round& round, FusedParams* p) {
  const MatmulCall& call = round.call;
  const uint32_t tile_columns = round.plan.tile_columns;
  const uint64_t rows = call.rows;
  const uint64_t outer = call.outer * (round.reduce_scatter() ? 1 : round.size());
  int k_end = 0;
  for (size_t i = 0; i < call.ws.size(); ++i) {
    const size_t x = round.reduce_scatter() ? i : 0, product = round.reduce_scatter() ? 0 : i;
    const uint64_t k = call.ks[x], all = call.ns[product], n = round.ColumnsOf(product);
    const int64_t before = round.ColumnsBefore(product);
    MatrixParams& matrix = p->matrix[i];
    matrix.x = round.MapOfX(x, {kTileDepth, kHalfRows, 1});
    matrix.w = call.transposed ? TensorMap(call.type, ElementAt(call.ws[i], before * k), {k, n},
                                           {kTileDepth, tile_columns / 2}, k)
                               : TensorMap(call.type, ElementAt(call.ws[i], before), {n, k},
                                           {64, kTileDepth / 2}, all);
    matrix.product = TensorMap(call.type, ElementAt(call.products[product], before),
                               {n, rows, outer}, {64, kHalfRows, 1}, all);
    matrix.first_tile = p->column_tiles;
    if (product == i) p->column_tiles += DivideUp(n, tile_columns);
    k_end = round.reduce_scatter() ? k_end + DivideUp(k, kTileDepth) : p->k_chunks;
    matrix.k_end = k_end;
  }
}

void SetWgrads(const Round& round, FusedParams* p) {
  if (p->wgrads == 0) return;
  const MatmulCall& call = round.call;
  const uint64_t n = round.ColumnsOf(0), rows = call.rows, outer = call.outer * round.size();
  p->wgrad_lhs = TensorMap(call.type, ElementAt(call.wgrad_lhs, round.first), {n, rows, outer},
                           {64, kHalfRows, 1}, call.ns[0]);
  p->wgrad_row_tiles = DivideUp(n, kTileRows);
  p->wgrad_row_pairs = DivideUp(p->wgrad_row_tiles, kClusterSize);
  for (int i = 0; i < p->wgrads; ++i) {
    const uint64_t k = call.ks[i];
    WgradParams& wgrad = p->wgrad[i];
    wgrad.x = round.MapOfX(i, {64, kHalfRows / 2, 1});
    wgrad.product = TensorMap(call.type, ElementAt(call.wgrads[i], round.first * k), {k, n, 1},
                              {64, kHalfRows, 1}, k);
    wgrad.first_tile = p->wgrad_column_tiles;
    p->wgrad_column_tiles += DivideUp(k, round.plan.tile_columns);
  }
}

void SetOrder(const Round& round, FusedParams* p) {
  const MatmulPlan& plan = round.plan;
  p->band_pairs = plan.band_pairs;
  if (p->wgrads > 0) {
    p->row_pairs_before_wgrad = std::min(plan.row_pairs_before_wgrad, (p->size - 1) * p->row_pairs);
    p->wgrad_tiles_last = p->reduce_scatter ? 0
                                            : std::min(plan.wgrad_tiles_last,
                                                       p->wgrad_row_pairs * p->wgrad_column_tiles);
  }
  SetShortBands(p);
  p->part_tiles = DivideUp(int64_t{p->row_pairs} * p->column_tiles, plan.parts);
  p->n_major = !round.call.transposed;
  p->direct = plan.direct;
  // Only where the warpgroups alternate does one store while the other one multiplies.
  const bool paces = plan.direct && plan.tile_columns <= kMaxAlternatingColumns;
  p->pace_clocks = paces ? kPaceClocksPerChunk * p->k_chunks : 0;
}

FusedKernel KernelFor(ElementType type, bool transposed, bool wgrad, int columns) {
  return type == ElementType::kBF16 ? FusedKernelFor<ElementType::kBF16>(transposed, wgrad, columns)
                                    : FusedKernelFor<ElementType::kF16>(transposed, wgrad, columns);
}

// The number of blocks that the device can run at the same time.
int BlocksOf(const FusedKernel& kernel) {
  int device;
  CheckLaunch(cudaGetDevice(&device));
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> known;
  std::lock_guard lock(mutex);
  int& blocks = known[{device, kernel.function}];
  if (blocks == 0) {
    cudaFuncAttributes attributes;
    CheckLaunch(cudaFuncGetAttributes(&attributes, kernel.function));
    if (attributes.numRegs != kRegisters) {
      throw RuntimeError("the fused matmul kernel was compiled for ", attributes.numRegs,
                         " registers a thread, but needs ", kRegisters,
                         "; compile it without a register limit");
    }
    CheckLaunch(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(kernel.shared_bytes)));
    int sms, clusters;
    CheckLaunch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kClusterSize, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = sms / kClusterSize * kClusterSize;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kernel.shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CheckLaunch(cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &config));
    blocks = kClusterSize * std::min(clusters, kMaxClusters);
  }
  return blocks;
}

void Launch(const Round& round, cudaStream_t stream) {
  FusedParams p = {};
  SetSizes(round, &p);
  SetMemory(round, &p);
  SetMatrices(round, &p);
  SetWgrads(round, &p);
  SetOrder(round, &p);
  const FusedKernel kernel =
      KernelFor(round.call.type, round.call.transposed, p.wgrads > 0, round.plan.tile_columns);
  void* arguments[] = {&p};
  CheckLaunch(cudaLaunchKernel(kernel.function, dim3(BlocksOf(kernel)), dim3(kThreads), arguments,
                               kernel.shared_bytes, stream));
}

}  // namespace

size_t FusedRingBytes(Algorithm algorithm, const MatmulCall& call, int size,
                      const MatmulPlan& plan) {
  const int64_t chunks_of_row_tile = algorithm == Algorithm::kAllGatherMatmul
                                         ? KChunks(call)
                                         : ColumnsOfRound(call, plan) / kTileDepth;
  return static_cast<size_t>(size - 1) * RowTiles(call) * chunks_of_row_tile * kChunk;
}

size_t FusedScratchBytes(Algorithm algorithm, const MatmulCall& call, int size,
                         const MatmulPlan& plan) {
  const bool stages_products = algorithm == Algorithm::kMatmulReduceScatter && !plan.direct;
  return stages_products ? FusedRingBytes(algorithm, call, size, plan) : 0;
}

void LaunchFused(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                 const MatmulCall& call, cudaStream_t stream) {
  const int64_t n = call.ns[0];
  const int64_t of_round =
      algorithm == Algorithm::kMatmulReduceScatter ? ColumnsOfRound(call, plan) : n;
  for (int64_t first = 0; first < n; first += of_round) {
    Launch({member, algorithm, plan, call, first, std::min(of_round, n - first)}, stream);
  }
}

void LoadFusedKernels() {
  int device, major;
  CheckLaunch(cudaGetDevice(&device));
  CheckLaunch(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != kFusedComputeCapability) return;
  for (const ElementType type : {ElementType::kBF16, ElementType::kF16}) {
    for (const int columns : kTileColumns) {
      BlocksOf(KernelFor(type, false, false, columns));
      BlocksOf(KernelFor(type, true, false, columns));
    }
    BlocksOf(KernelFor(type, true, true, kWgradColumns));
  }
}

}  // namespace jax_intranode
