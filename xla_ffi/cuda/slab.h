// A slab in device memory, exported to and opened from other processes by CUDA IPC.
//
// The memory is cudaMalloc's own: XLA's buffers live in virtual-memory allocations, which CUDA IPC
// refuses. Errors are thrown as std::runtime_error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace jax_intranode {

// Throws if `status` is an error. `what` names the action that failed.
void ThrowIfError(cudaError_t status, const std::string& what);

// Looks up a function of the CUDA driver (its version of CUDA 12.0), so that the module loads on
// machines without a driver. Throws if the driver has no such function.
void* DriverFunction(const char* name);

// Makes `device` current in this thread during the object's lifetime. A thread that had no context
// has none afterwards: setting "device 0" would create a context there, in each of n processes.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();

 private:
  void* previous_ = nullptr;  // a CUcontext
};

constexpr size_t kRecordsBytes = 4096;

class Slab {
 public:
  // Zeroed memory on `device`.
  static std::unique_ptr<Slab> Allocate(int device, size_t bytes, bool shared);
  // Another process's slab, as kernels on `device` address it.
  static std::unique_ptr<Slab> Open(int device, const std::string& handle, size_t bytes);

  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // The bytes of a cudaIpcMemHandle_t.
  std::string Handle() const;
  void Unlink() {}  // a handle of CUDA IPC has no name
  char* address() const { return address_; }
  // A page of zeroed host memory for failure records, which kernels of any device can write. It
  // lives as long as the slab.
  char* records() const { return records_; }

 private:
  Slab(int device, char* address, bool opened)
      : device_(device), address_(address), opened_(opened) {}

  int device_;
  char* address_;
  char* records_ = nullptr;
  bool opened_;
};

// Lets kernels on `device` address memory of `peer`, a device of this process.
void EnablePeerAccess(int device, int peer);

// Sets bytes that `device` can address to `value`; returns when it is done.
void Fill(int device, uintptr_t address, int value, size_t bytes);

// Copies between host memory and memory of `device`; returns when it is done.
void Copy(int device, void* to, const void* from, size_t bytes);

// Writes or reads one word by a kernel on `device`; returns when it is done. The rendezvous tests
// the paths to peers with these.
void WriteWord(int device, uintptr_t address, uint32_t value);
uint32_t ReadWord(int device, uintptr_t address);

}  // namespace jax_intranode
