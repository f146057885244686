#include "graph_timing.h"

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

// One launch. In a permute each rank sends to the next one.
cudaError_t LaunchTimed(const DeviceOperation& operation, const DeviceGroup& group,
                        const Links& links, const Buffer& buffer, cudaStream_t stream) {
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

  cudaGraph_t graph;
  ThrowIfError(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
  cudaError_t error = cudaSuccess;
  for (int call = 0; call < calls && error == cudaSuccess; ++call) {
    error = LaunchTimed(operation, group, links, {in.get(), out.get(), bytes}, stream);
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
