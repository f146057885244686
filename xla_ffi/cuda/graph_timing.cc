#include "graph_timing.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "../text.h"
#include "owned.h"

namespace jax_intranode {
namespace {

// Launches before the timed ones, in which the ranks get in step.
constexpr int kUntimed = 3;

Owned<void> DeviceMemory(size_t bytes) {
  void* memory = nullptr;
  ThrowIfError(cudaMalloc(&memory, bytes), "allocating " + std::to_string(bytes) + " bytes");
  return Owned<void>(memory);
}

// One launch. In a permute each rank sends to the next one, in a ragged all-to-all a row to each:
// `tables` has the rows' numbers, their sizes, and the number of this rank, for each.
cudaError_t LaunchTimed(const DeviceOperation& operation, const DeviceGroup& group,
                        const Links& links, const Buffer& buffer, const int32_t* tables,
                        cudaStream_t stream) {
  if (operation.algorithm == Algorithm::kRagged) {
    const uint32_t n = group.size;
    const int32_t *const sizes = tables + n, *const places = sizes + n;
    const uint32_t window = RaggedWindow(group.epoch_buffer_bytes, group.size,
                                         operation.shape.blocks, 1, PacketBytes(operation.type));
    const auto row_bytes = static_cast<uint32_t>(buffer.bytes / n);
    const RaggedCall call{buffer.in, buffer.out, tables, sizes, places, sizes,
                          row_bytes, n,          n,      1,     window};
    return Launch(operation, group, call, stream);
  }
  if (operation.algorithm == Algorithm::kPermute) {
    Permutes call;
    call.Append(buffer, (group.rank + group.size - 1) % group.size, (group.rank + 1) % group.size);
    return Launch(operation, group, call, stream);
  }
  Buffers call;
  call.Append(buffer);
  return operation.algorithm == Algorithm::kHybridCubeMesh
             ? Launch(operation, group, LinkedBuffers{call, links}, stream)
             : Launch(operation, group, call, stream);
}

}  // namespace

GraphTiming TimeInGraph(int device, const DeviceGroup& group, const Links& links,
                        const DeviceOperation& operation, const std::string& input, int calls,
                        int repetitions) {
  const auto& [algorithm, type, segments, shape, permutations] = operation;
  const CurrentDevice current(device);
  const size_t bytes = input.size() / InputShards(algorithm, group.size);
  if (bytes == 0 || !CanCut(algorithm, segments) ||
      EpochBufferBytesNeeded(algorithm, type, PacksOf(bytes), group.size, segments) >
          group.epoch_buffer_bytes ||
      shape.blocks < 1 || shape.blocks > kMaxBlocks || shape.threads < 32 ||
      shape.threads > kMaxThreads || shape.threads % 32 != 0 || calls < 1 || repetitions < 1) {
    throw RuntimeError(bytes, " bytes, ", segments, " segments, ", shape.blocks, " blocks of ",
                       shape.threads, " threads can't be timed");
  }
  const size_t output_bytes = bytes * OutputShards(algorithm, group.size);
  Owned<void> in = DeviceMemory(input.size()), out = DeviceMemory(output_bytes);
  const Owned<CUstream_st> owned_stream = NewStream();
  const cudaStream_t stream = owned_stream.get();
  ThrowIfError(
      cudaMemcpyAsync(in.get(), input.data(), input.size(), cudaMemcpyHostToDevice, stream),
      "copying the input");
  ThrowIfError(cudaMemsetAsync(out.get(), 0xAB, output_bytes, stream), "poisoning the output");
  std::vector<int32_t> of_rows(3 * group.size, 1);
  std::iota(of_rows.begin(), of_rows.begin() + group.size, 0);
  std::fill_n(of_rows.rbegin(), group.size, group.rank);
  const size_t table_bytes = of_rows.size() * sizeof(int32_t);
  const Owned<void> tables = DeviceMemory(table_bytes);
  ThrowIfError(
      cudaMemcpyAsync(tables.get(), of_rows.data(), table_bytes, cudaMemcpyHostToDevice, stream),
      "copying tables");

  cudaGraph_t graph;
  ThrowIfError(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
  cudaError_t error = cudaSuccess;
  for (int call = 0; call < calls && error == cudaSuccess; ++call) {
    error = LaunchTimed(operation, group, links, {in.get(), out.get(), bytes},
                        static_cast<const int32_t*>(tables.get()), stream);
  }
  const cudaError_t end_error = cudaStreamEndCapture(stream, &graph);
  const Owned<CUgraph_st> owned_graph(end_error == cudaSuccess ? graph : nullptr);
  ThrowIfError(error, "launching");
  ThrowIfError(end_error, "capturing");
  cudaGraphExec_t program;
  ThrowIfError(cudaGraphInstantiate(&program, graph, 0), "instantiating a graph");
  const Owned<CUgraphExec_st> owned_program(program);

  // All launches are queued before the first wait, so the host delays none of them.
  std::vector<Owned<CUevent_st>> events;
  for (int k = 0; k < kUntimed + repetitions; ++k) {
    if (k >= kUntimed) {
      events.push_back(NewEvent());
      ThrowIfError(cudaEventRecord(events.back().get(), stream), "recording an event");
    }
    ThrowIfError(cudaGraphLaunch(program, stream), "launching a graph");
  }
  events.push_back(NewEvent());
  ThrowIfError(cudaEventRecord(events.back().get(), stream), "recording an event");
  ThrowIfError(cudaStreamSynchronize(stream), "waiting for a graph");

  GraphTiming timing;
  for (int k = 0; k < repetitions; ++k) {
    float milliseconds;
    ThrowIfError(cudaEventElapsedTime(&milliseconds, events[k].get(), events[k + 1].get()),
                 "reading a time");
    timing.microseconds.push_back(milliseconds * 1e3 / calls);
  }
  timing.output.resize(output_bytes);
  ThrowIfError(cudaMemcpyAsync(timing.output.data(), out.get(), output_bytes,
                               cudaMemcpyDeviceToHost, stream),
               "copying the output");
  ThrowIfError(cudaStreamSynchronize(stream), "copying the output");
  return timing;
}

}  // namespace jax_intranode
