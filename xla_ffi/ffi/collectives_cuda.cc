#include "collectives_cuda.h"

#include <utility>

#include "../cuda/norms.h"
#include "../host/call_sites.h"
#include "norm_call.h"

namespace jax_intranode {
namespace {

// The state that instantiate creates for execute. All devices of the executable share it; read
// only.
struct DeviceSite {
  static ffi::TypeId id;
  std::shared_ptr<DeviceCommunicator> communicator;
  Algorithm algorithm;
  uint32_t segments;
  LaunchShape shape;
  uint32_t number;           // of the call site
  float eps, weight_offset;  // of a norm
};
ffi::TypeId DeviceSite::id = {};

ffi::ErrorOr<std::unique_ptr<DeviceSite>> InstantiateNorm(ffi::Span<const int64_t> device_ids,
                                                          int64_t group_size, int32_t algorithm,
                                                          int32_t segments, int32_t blocks,
                                                          int32_t threads, std::string_view site,
                                                          float eps, float weight_offset) {
  const Partition partition{{device_ids.begin(), device_ids.end()}, group_size};
  std::shared_ptr<DeviceCommunicator> communicator =
      Registry<DeviceCommunicator>::Get().Find(partition);
  if (!communicator) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, NoCommunicator(partition)));
  }
  const int most = IsNorm(static_cast<Algorithm>(algorithm)) ? kMaxNormThreads : kMaxThreads;
  if (blocks < 1 || blocks > kMaxBlocks || threads < 32 || threads > most || threads % 32 != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax_intranode: a collective can't be launched with " + std::to_string(blocks) +
        " blocks of " + std::to_string(threads) + " threads."));
  }
  ffi::Error error = CheckSegments(static_cast<Algorithm>(algorithm), segments);
  if (error.failure()) return ffi::Unexpected(std::move(error));
  error = CheckLinks(static_cast<Algorithm>(algorithm), communicator->is_cube_mesh);
  if (error.failure()) return ffi::Unexpected(std::move(error));
  return std::make_unique<DeviceSite>(DeviceSite{std::move(communicator),
                                                 static_cast<Algorithm>(algorithm),
                                                 static_cast<uint32_t>(segments),
                                                 {blocks, threads},
                                                 CallSites::Get().Number(std::string(site)),
                                                 eps,
                                                 weight_offset});
}

ffi::ErrorOr<std::unique_ptr<DeviceSite>> Instantiate(ffi::Span<const int64_t> device_ids,
                                                      int64_t group_size, int32_t algorithm,
                                                      int32_t segments, int32_t blocks,
                                                      int32_t threads, std::string_view site) {
  return InstantiateNorm(device_ids, group_size, algorithm, segments, blocks, threads, site, 0, 0);
}

ffi::Error LaunchError(const DeviceSite& site, int32_t device, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal("jax_intranode: launching " +
                              std::string(OperationName(site.algorithm)) + " on CUDA device " +
                              std::to_string(device) + " failed: " + cudaGetErrorString(status));
}

// Counts a call of a handler, and gets the device's group for it.
ffi::Error BeginCall(const DeviceSite& site, int32_t device, DeviceGroup* group) {
  device_handler_calls.fetch_add(1, std::memory_order_relaxed);
  DeviceCommunicator& communicator = *site.communicator;
  if (ffi::Error error = CheckUsable(communicator, device); error.failure()) return error;
  *group = *communicator.members[device];
  group->site = site.number;
  return ffi::Error::Success();
}

ffi::Error LaunchCollective(cudaStream_t stream, int32_t device, DeviceSite* site,
                            ffi::RemainingArgs xs, ffi::RemainingRets ys) {
  DeviceGroup group;
  if (ffi::Error error = BeginCall(*site, device, &group); error.failure()) return error;
  ElementType type;
  Buffers buffers;
  ffi::Error error = CollectBuffers(site->algorithm, site->segments, group.size,
                                    group.epoch_buffer_bytes, xs, ys, &type, &buffers);
  if (error.failure()) return error;
  const cudaError_t status =
      buffers.count == 1
          ? Launch(site->algorithm, type, group, buffers.buffer[0], site->segments, site->shape,
                   stream)
          : Launch(site->algorithm, type, group, buffers, site->segments, site->shape, stream);
  return LaunchError(*site, device, status);
}

// The operations of one call follow each other on the stream.
ffi::Error LaunchNorms(cudaStream_t stream, int32_t device, DeviceSite* site, ffi::RemainingArgs xs,
                       ffi::RemainingRets ys) {
  DeviceGroup group;
  if (ffi::Error error = BeginCall(*site, device, &group); error.failure()) return error;
  ElementType type;
  NormCall call;
  ffi::Error error = CollectNorm(site->algorithm, group.size, site->eps, site->weight_offset, xs,
                                 ys, &type, &call);
  if (error.failure()) return error;
  if (!NormFits(type, call, site->shape)) {
    return ffi::Error::InvalidArgument("jax_intranode: " + std::to_string(site->shape.threads) +
                                       " threads can't normalize rows of " +
                                       std::to_string(call.hidden) + " elements.");
  }
  return ForEachNormOperation(
      call, type, group.size, group.epoch_buffer_bytes, [&](const NormCall& part) {
        return LaunchError(*site, device, LaunchNorm(type, group, part, site->shape, stream));
      });
}

// XLA calls it eagerly or while it captures a graph, and not at all when it replays a graph. So it
// only launches and keeps no state.
template <auto launch>
ffi::Error Execute(cudaStream_t stream, int32_t device, DeviceSite* site, ffi::RemainingArgs xs,
                   ffi::RemainingRets ys, ffi::Dictionary) {
  return Launched(*site->communicator, device, stream, launch(stream, device, site, xs, ys));
}

// What collectives and norms both get.
auto InstantiateBinding() {
  return ffi::Ffi::BindInstantiate()
      .Attr<ffi::Span<const int64_t>>("device_ids")
      .Attr<int64_t>("group_size")
      .Attr<int32_t>("algorithm")
      .Attr<int32_t>("segments")
      .Attr<int32_t>("blocks")
      .Attr<int32_t>("threads")
      .Attr<std::string_view>("site");
}
auto ExecuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<DeviceSite>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

std::atomic<uint64_t> device_handler_calls{0};

ffi::Error CheckUsable(DeviceCommunicator& communicator, int32_t device) {
  if (communicator.closed) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, kShutDown);
  if (device < 0 || static_cast<size_t>(device) >= communicator.members.size() ||
      !communicator.members[device]) {
    return ffi::Error::Internal("jax_intranode: a collective ran on CUDA device " +
                                std::to_string(device) + ", which is in none of its groups.");
  }
  if (std::string failure = communicator.Refuse(device); !failure.empty()) {
    return ffi::Error::Internal(std::move(failure));
  }
  return ffi::Error::Success();
}

ffi::Error Launched(DeviceCommunicator& communicator, int32_t device, cudaStream_t stream,
                    ffi::Error error) {
  if (error.success() || communicator.closed) return error;
  communicator.set_failure(error.message());
  for (const auto& member : communicator.members) {
    if (member) static_cast<volatile FailureRecord*>(member->failure)->abort = 1;
  }
  if (device >= 0 && static_cast<size_t>(device) < communicator.members.size() &&
      communicator.members[device]) {
    uint32_t* const closed = &communicator.members[device]->Header()->closed;
    cudaMemsetAsync(closed, 1, sizeof(*closed), stream);  // after what was launched before
    cudaGetLastError();
  }
  return error;
}

XLA_FFI_Error* CudaCollectiveInstantiate(XLA_FFI_CallFrame* frame) {
  RegisterStateType<DeviceSite>(frame->api, "jax_intranode_device_site");
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate, InstantiateBinding());
  return (*handler)(frame);
}

XLA_FFI_Error* CudaCollective(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Execute<LaunchCollective>, ExecuteBinding(),
                         {ffi::Traits::kCmdBufferCompatible});
  return (*handler)(frame);
}

XLA_FFI_Error* CudaNormInstantiate(XLA_FFI_CallFrame* frame) {
  RegisterStateType<DeviceSite>(frame->api, "jax_intranode_device_site");
  XLA_FFI_DEFINE_HANDLER(handler, InstantiateNorm,
                         InstantiateBinding().Attr<float>("eps").Attr<float>("weight_offset"));
  return (*handler)(frame);
}

XLA_FFI_Error* CudaNorm(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Execute<LaunchNorms>, ExecuteBinding(),
                         {ffi::Traits::kCmdBufferCompatible});
  return (*handler)(frame);
}

}  // namespace jax_intranode
