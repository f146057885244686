#include <cstring>
#include <stdexcept>

#include "../kernels/memory.h"
#include "../text.h"
#include "launch.h"
#include "owned.h"
#include "slab.h"

namespace jax_intranode {
namespace {

__global__ void jax_intranode_write_word(uint32_t* to, uint32_t value) { Store(to, value); }

__global__ void jax_intranode_read_word(uint32_t* from, uint32_t* to) { *to = Load(from); }

// cuCtxGetCurrent and cuCtxSetCurrent: the runtime API has no way to say "no context".
struct ContextFunctions {
  int (*get)(void**);
  int (*set)(void*);
};

const ContextFunctions& Contexts() {
  static const ContextFunctions functions{
      reinterpret_cast<int (*)(void**)>(DriverFunction("cuCtxGetCurrent")),
      reinterpret_cast<int (*)(void*)>(DriverFunction("cuCtxSetCurrent"))};
  return functions;
}

class Stream {
 public:
  cudaStream_t get() const { return stream_.get(); }
  // `enqueued`: the status of what was enqueued.
  void Synchronize(cudaError_t enqueued, const std::string& what) {
    ThrowIfError(enqueued, what);
    ThrowIfError(cudaStreamSynchronize(get()), what);
  }

 private:
  const Owned<CUstream_st> stream_ = NewStream();
};

}  // namespace

void ThrowIfError(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that no later call reports it again
  throw RuntimeError(what, " failed: ", cudaGetErrorName(status), " (", cudaGetErrorString(status),
                     ")");
}

void* DriverFunction(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  ThrowIfError(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result),
               name);
#else
  ThrowIfError(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result), name);
#endif
  if (function == nullptr) {
    throw RuntimeError("the CUDA driver has no ", name);
  }
  return function;
}

CurrentDevice::CurrentDevice(int device) {
  ThrowIfError(Contexts().get(&previous_) == 0 ? cudaSuccess : cudaErrorUnknown,
               "reading the current CUDA context");
  ThrowIfError(cudaSetDevice(device), "selecting CUDA device " + std::to_string(device));
}

CurrentDevice::~CurrentDevice() { Contexts().set(previous_); }

std::unique_ptr<Slab> Slab::Allocate(int device, size_t bytes, bool) {
  CurrentDevice current(device);
  void* address = nullptr;
  ThrowIfError(cudaMalloc(&address, bytes),
               "allocating a slab of " + std::to_string(bytes >> 20) + " MiB on CUDA device " +
                   std::to_string(device) +
                   " (JAX leaves room for it if XLA_PYTHON_CLIENT_MEM_FRACTION is lowered; "
                   "JAX_INTRANODE_SLAB_MIB and JAX_INTRANODE_RING_MIB set its size)");
  std::unique_ptr<Slab> slab(new Slab(device, static_cast<char*>(address), false));
  Fill(device, reinterpret_cast<uintptr_t>(address), 0, bytes);
  void* records = nullptr;
  ThrowIfError(cudaHostAlloc(&records, kRecordsBytes, cudaHostAllocPortable | cudaHostAllocMapped),
               "allocating failure records");
  memset(records, 0, kRecordsBytes);
  slab->records_ = static_cast<char*>(records);
  return slab;
}

std::unique_ptr<Slab> Slab::Open(int device, const std::string& handle, size_t) {
  cudaIpcMemHandle_t ipc;
  if (handle.size() != sizeof(ipc)) {
    throw RuntimeError("a CUDA IPC handle has ", sizeof(ipc), " bytes, not ", handle.size());
  }
  memcpy(&ipc, handle.data(), sizeof(ipc));
  CurrentDevice current(device);
  void* address = nullptr;
  ThrowIfError(cudaIpcOpenMemHandle(&address, ipc, cudaIpcMemLazyEnablePeerAccess),
               "opening a peer's slab by CUDA IPC on CUDA device " + std::to_string(device));
  return std::unique_ptr<Slab>(new Slab(device, static_cast<char*>(address), true));
}

Slab::~Slab() {
  try {
    CurrentDevice current(device_);
    // Returns when no kernel of the device can use the memory or the records any more.
    opened_ ? cudaIpcCloseMemHandle(address_) : cudaFree(address_);
    if (records_ != nullptr) cudaFreeHost(records_);
    cudaGetLastError();  // so that no later call reports it
  } catch (const std::runtime_error&) {
    // At exit CUDA may already have shut down. Then there is nothing to free.
  }
}

std::string Slab::Handle() const {
  CurrentDevice current(device_);
  cudaIpcMemHandle_t ipc;
  ThrowIfError(cudaIpcGetMemHandle(&ipc, address_), "exporting a slab by CUDA IPC");
  return std::string(reinterpret_cast<const char*>(&ipc), sizeof(ipc));
}

void EnablePeerAccess(int device, int peer) {
  CurrentDevice current(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  ThrowIfError(status, "enabling access from CUDA device " + std::to_string(device) +
                           " to CUDA device " + std::to_string(peer));
}

void Fill(int device, uintptr_t address, int value, size_t bytes) {
  CurrentDevice current(device);
  Stream stream;
  stream.Synchronize(cudaMemsetAsync(reinterpret_cast<void*>(address), value, bytes, stream.get()),
                     "clearing a slab");
}

void Copy(int device, void* to, const void* from, size_t bytes) {
  CurrentDevice current(device);
  Stream stream;
  stream.Synchronize(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream.get()),
                     "copying a peer buffer");
}

void WriteWord(int device, uintptr_t address, uint32_t value) {
  CurrentDevice current(device);
  Stream stream;
  stream.Synchronize(Launch<&jax_intranode_write_word>(1, 1, stream.get(),
                                                       reinterpret_cast<uint32_t*>(address), value),
                     "writing to a peer's slab");
}

uint32_t ReadWord(int device, uintptr_t address) {
  CurrentDevice current(device);
  Stream stream;
  uint32_t* result = nullptr;
  ThrowIfError(cudaMallocHost(&result, sizeof(*result)), "allocating host memory");
  const std::unique_ptr<uint32_t, cudaError_t (*)(void*)> owner(result, cudaFreeHost);
  stream.Synchronize(Launch<&jax_intranode_read_word>(1, 1, stream.get(),
                                                      reinterpret_cast<uint32_t*>(address), result),
                     "reading a peer's slab");
  return *result;
}

}  // namespace jax_intranode
