// XLA handlers for bodies on a peer buffer (peer.h): one source for GPUs and for CPU devices.
//
//   ffi::Buffer arguments and attributes as in any XLA handler, with a Call in front:
//
//   namespace peer = ::jax_intranode::v1;
//   peer::Result RingShift(peer::Call call, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y,
//                          int64_t shift) {
//     if (...) return call.Error("...");
//     return call.Run(Body{...}, blocks, threads);
//   }
//   JAX_INTRANODE_PEER_HANDLER(RingShiftHandler, RingShift, peer::Bind()
//       .Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("shift"));
//   JAX_INTRANODE_PEER_LIBRARY();   // once in a library
//
// `jax_intranode.register_ffi_library(path, {"ring_shift": "RingShiftHandler"}, platform="gpu")`
// registers it, and `PeerBuffer.ffi_call("ring_shift", ...)` calls it. That adds the attributes
// which name the buffer and the call; Bind() reads them.
//
// Compile it with the headers of XLA of the oldest jaxlib that is to run it
// (jax.ffi.include_dir()), and with those of jax_intranode (jax_intranode.get_include()). C++20.
//
// XLA may run a handler eagerly, capture it into a CUDA graph, or replay it from there without
// calling the handler. So a handler does nothing but check its arguments and call Run() once.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "peer.h"
#include "xla/ffi/api/ffi.h"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

namespace jax_intranode::v1 {

namespace ffi = ::xla::ffi;

// What a handler returns. On the CPU the result comes later, so that XLA's thread does not wait.
#if defined(__CUDACC__)
using Result = ffi::Error;
#else
using Result = ffi::Future;
#endif

inline Result Failed(ffi::Error error) {
#if defined(__CUDACC__)
  return error;
#else
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
#endif
}

// The functions that register_ffi_library has handed to this library. Hidden, so that each library
// has its own.
__attribute__((visibility("hidden"))) inline const Api*& TheApi() {
  static const Api* api = nullptr;
  return api;
}

#if defined(__CUDACC__)

template <class Body>
__global__ void jax_intranode_peer_kernel(const __grid_constant__ Peers peers,
                                          const __grid_constant__ Body body) {
  DeviceThread thread(peers);
  body(thread, peers);
}

// All kernels of this library.
__attribute__((visibility("hidden"))) inline std::vector<const void*>& Kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

// Adds the kernel of a body when the library is opened.
template <class Body>
struct __attribute__((visibility("hidden"))) Kernel {
  static const void* Add() {
    const void* kernel = reinterpret_cast<const void*>(&jax_intranode_peer_kernel<Body>);
    Kernels().push_back(kernel);
    return kernel;
  }
  inline static const void* const address = Add();
};

inline const char* LoadKernels() {
  for (const void* kernel : Kernels()) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return cudaGetErrorString(status);
  }
  return nullptr;
}

#endif

// One rank's part in a call, as its handler gets it.
class Call {
 public:
  // The rank, the world size, and the memory of all ranks.
  const Peers& peers() const { return peers_; }

  // Refuses the call, for instance because an argument does not fit. On GPUs no later call of the
  // group runs, because its peers may have launched this one.
  Result Error(const std::string& what) const { return Failed(ffi::Error::InvalidArgument(what)); }

  // Runs a body: on GPUs as a kernel with this grid, which must be the same on all ranks and has at
  // most kMaxBlocks blocks of 1024 threads. On the CPU one thread runs it. What the body points to,
  // the buffers of the call, stays valid until it ends.
  template <class Body>
  Result Run(const Body& body, int blocks, int threads) const {
    if (blocks < 1 || blocks > kMaxBlocks || threads < 1 || threads > 1024) {
      return Error("a body can't run on " + std::to_string(blocks) + " blocks of " +
                   std::to_string(threads) + " threads; at most " + std::to_string(kMaxBlocks) +
                   " of 1024");
    }
#if defined(__CUDACC__)
    static_assert(sizeof(Body) + sizeof(Peers) <= 4096, "kernel parameters have 4 KiB");
    void* arguments[] = {const_cast<Peers*>(&peers_), const_cast<Body*>(&body)};
    const cudaError_t status =
        cudaLaunchKernel(Kernel<Body>::address, dim3(blocks), dim3(threads), arguments, 0, stream_);
    if (status == cudaSuccess) return ffi::Error::Success();
    return Failed(ffi::Error::Internal(std::string("launching a kernel on a peer buffer failed: ") +
                                       cudaGetErrorString(status)));
#else
    struct Running {
      Body body;
      Peers peers;
      ffi::Promise promise;
    };
    auto* running = new Running{body, peers_, {}};
    ffi::Future future(running->promise);
    TheApi()->run(
        call_, device_,
        [](void* context, HostWait* wait) {
          auto* running = static_cast<Running*>(context);
          HostThread thread(wait);
          running->body(thread, running->peers);
        },
        [](void* context, const char* error) {
          auto* running = static_cast<Running*>(context);
          if (error == nullptr) {
            running->promise.SetAvailable();
          } else {
            running->promise.SetError(ffi::Error::Internal(error));
          }
          delete running;
        },
        running);
    return future;
#endif
  }

  // Why the call can't run; empty if it can.
  const std::string& error() const { return error_; }

  // What the handler returns, after jax_intranode has learnt of an error.
  Result Return(Result result) const {
#if defined(__CUDACC__)
    if (result.failure() && call_ != nullptr) {
      TheApi()->failed(call_, device_, stream_, result.message().c_str());
    }
#endif
    return result;
  }

 private:
  friend struct ::xla::ffi::CtxDecoding<Call>;

  Peers peers_{};
  void* call_ = nullptr;
  int32_t device_ = 0;
  std::string error_;
#if defined(__CUDACC__)
  cudaStream_t stream_ = nullptr;
#endif
};

}  // namespace jax_intranode::v1

template <>
struct xla::ffi::CtxDecoding<jax_intranode::v1::Call> {
  using Type = jax_intranode::v1::Call;

  // The context's type has another name in each version of XLA's headers.
  template <class Context>
  static std::optional<Type> Decode(const XLA_FFI_Api* api, Context* context,
                                    DiagnosticEngine& diagnostic) {
    Type call;
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!device) return std::nullopt;
    call.device_ = *device;
#if defined(__CUDACC__)
    const auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, context, diagnostic);
    if (!stream) return std::nullopt;
    call.stream_ = *stream;
#endif
    const auto* table = jax_intranode::v1::TheApi();
    if (table == nullptr) {
      call.error_ = "the library was not registered by jax_intranode.register_ffi_library";
    } else if (const char* error =
                   table->find(api, context, call.device_, &call.call_, &call.peers_)) {
      call.error_ = error;
    }
    return call;
  }
};

namespace jax_intranode::v1 {

// The binding of a handler's further arguments, results and attributes begins with this.
inline auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<Call>()
      .Attr<std::string_view>("peer_buffer")
      .Attr<std::string_view>("site");
}

// The function that XLA calls: it drops the attributes that Bind() reads.
template <class... Args>
auto Guarded(Result (*function)(Call, Args...)) {
  return [function](Call call, std::string_view, std::string_view, Args... args) -> Result {
    if (!call.error().empty()) {
      return call.Return(Failed(ffi::Error(ffi::ErrorCode::kFailedPrecondition, call.error())));
    }
    return call.Return(function(call, std::move(args)...));
  };
}

template <class Function, class Binding>
auto MakeHandler(Function function, Binding binding) {
#if defined(__CUDACC__)
  return binding.To(Guarded(function), {ffi::Traits::kCmdBufferCompatible});
#else
  return binding.To(Guarded(function));
#endif
}

}  // namespace jax_intranode::v1

// Defines the exported symbol `symbol` as the handler of `function`, with a binding that begins
// with Bind().
#define JAX_INTRANODE_PEER_HANDLER(symbol, function, ...)                   \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(  \
      XLA_FFI_CallFrame* frame) {                                           \
    static auto* const handler =                                            \
        ::jax_intranode::v1::MakeHandler(&function, __VA_ARGS__).release(); \
    return handler->Call(frame);                                            \
  }                                                                         \
  static_assert(true)

#if defined(__CUDACC__)
#define JAX_INTRANODE_PLATFORM ::jax_intranode::v1::kCuda
#define JAX_INTRANODE_LOAD &::jax_intranode::v1::LoadKernels
#else
#define JAX_INTRANODE_PLATFORM ::jax_intranode::v1::kCpu
#define JAX_INTRANODE_LOAD nullptr
#endif

// Defines what register_ffi_library looks for. To be used once in a library.
#define JAX_INTRANODE_PEER_LIBRARY()                                                      \
  extern "C" __attribute__((visibility("default"))) const ::jax_intranode::v1::Library*   \
  jax_intranode_peer_library() {                                                          \
    static const ::jax_intranode::v1::Library library = {                                 \
        ::jax_intranode::v1::kVersion,                                                    \
        JAX_INTRANODE_PLATFORM,                                                           \
        XLA_FFI_API_MAJOR,                                                                \
        XLA_FFI_API_MINOR,                                                                \
        [](const ::jax_intranode::v1::Api* api) { ::jax_intranode::v1::TheApi() = api; }, \
        JAX_INTRANODE_LOAD};                                                              \
    return &library;                                                                      \
  }                                                                                       \
  static_assert(true)
