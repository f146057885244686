#include "collectives_cuda.h"

#include <type_traits>
#include <utility>

#include "../health/call_sites.h"
#include "operands.h"
#include "platform_cuda.h"
#include "site.h"

namespace jax_intranode {
namespace {

struct DeviceSite : CollectiveSite<DeviceCommunicator> {
  static constexpr char kName[] = "jax_intranode_device_site";
  inline static ffi::TypeId id = {};
  uint32_t number;  // of the call site

  ffi::Error Read(ffi::Dictionary attributes) {
    if (ffi::Error error = CollectiveSite::Read(attributes); error.failure()) return error;
    if (blocks < 1 || blocks > kMaxBlocks || threads < 32 || threads > kMaxThreads ||
        threads % 32 != 0) {
      return Invalid("a collective can't be launched with ", blocks, " blocks of ", threads,
                     " threads.");
    }
    number = CallSites::Get().Number(text);
    return ffi::Error::Success();
  }
};

// The operations of one call follow each other on the stream.
ffi::Error LaunchAll(cudaStream_t stream, int32_t device, const DeviceSite& site,
                     const DeviceCommunicator::Member& member, ffi::RemainingArgs xs,
                     ffi::RemainingRets ys) {
  DeviceGroup group = member.group;
  group.site = site.number;
  return ForEachOperation(
      site, group.size, group.rank, group.epoch_buffer_bytes, member.links, xs, ys,
      [&]<class Call>(ElementType type, const Call& call) {
        const LaunchShape shape{site.blocks, site.threads};
        if constexpr (std::is_same_v<Call, NormCall>) {
          if (!NormFits(type, call, shape)) {
            return Invalid(site.threads, " threads can't normalize rows of ", call.hidden,
                           " elements.");
          }
        }
        const cudaError_t status = Launch(
            {site.algorithm, type, site.segments, shape, site.permutations}, group, call, stream);
        if (status == cudaSuccess) return ffi::Error::Success();
        return Internal("launching ", OperationName(site.algorithm), " on CUDA device ", device,
                        " failed: ", cudaGetErrorString(status));
      });
}

// XLA calls it eagerly or while it captures a graph, and not at all when it replays a graph. So it
// only launches and keeps no state.
ffi::Error Execute(cudaStream_t stream, int32_t device, DeviceSite* site, ffi::RemainingArgs xs,
                   ffi::RemainingRets ys, ffi::Dictionary) {
  DeviceCommunicator& communicator = *site->communicator;
  device_handler_calls.fetch_add(1, std::memory_order_relaxed);
  ffi::Error error = CheckUsable(communicator, device);
  if (error.success()) {
    error = LaunchAll(stream, device, *site, communicator.members.at(device), xs, ys);
  }
  return Launched(communicator, device, stream, std::move(error));
}

// Closes memory after what was launched before. While XLA captures the stream, its work becomes a
// part of a graph, which XLA drops after an error: then on another stream.
cudaError_t Close(uint32_t* closed, int32_t device, cudaStream_t stream) {
  cudaStreamCaptureStatus capture;
  cudaError_t status = cudaStreamIsCapturing(stream, &capture);
  if (status == cudaSuccess) {
    const bool captures = capture != cudaStreamCaptureStatusNone;
    status =
        cudaMemsetAsync(closed, 1, sizeof(*closed), captures ? ClosingStreamOf(device) : stream);
  }
  cudaGetLastError();  // so that no later call reports it again
  return status;
}

}  // namespace

std::atomic<uint64_t> device_handler_calls{0};

ffi::Error CheckUsable(DeviceCommunicator& communicator, int32_t device) {
  if (communicator.closed) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, kShutDown);
  if (!communicator.members.contains(device)) {
    return Internal("a collective ran on CUDA device ", device,
                    ", which is in none of its groups.");
  }
  if (std::string failure = communicator.Refuse(device); !failure.empty()) {
    return ffi::Error::Internal(std::move(failure));
  }
  return ffi::Error::Success();
}

ffi::Error Launched(DeviceCommunicator& communicator, int32_t device, cudaStream_t stream,
                    ffi::Error error, uint32_t* of_buffer) {
  const auto member = communicator.members.find(device);
  if (error.success() || communicator.closed || member == communicator.members.end()) return error;
  communicator.set_failure(device, error.message());
  CudaPlatform::Get().Apply();
  cudaError_t status = Close(&member->second.group.Header()->closed, device, stream);
  if (status == cudaSuccess && of_buffer != nullptr) status = Close(of_buffer, device, stream);
  if (status == cudaSuccess) return error;
  return ffi::Error::Internal(error.message() +
                              " Its memory can't be closed, so replayed graphs may go wrong: " +
                              cudaGetErrorString(status));
}

XLA_FFI_Error* CudaCollectiveInstantiate(XLA_FFI_CallFrame* frame) {
  return InstantiateHandler<DeviceSite>(frame);
}

XLA_FFI_Error* CudaCollective(XLA_FFI_CallFrame* frame) {
  static auto* const handler =
      BindCall<DeviceSite>(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
          .To(Execute, {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(frame);
}

}  // namespace jax_intranode
