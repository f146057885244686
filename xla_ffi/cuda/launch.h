// The kernels of this module: how all of them are loaded, and how one is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>
#include <vector>

namespace jax_intranode {

inline std::vector<const void*>& ListedKernels() {
  static auto* const kernels = new std::vector<const void*>;
  return *kernels;
}

// A kernel that is listed when the module is opened.
template <auto kKernel>
inline const void* const kListed =
    ListedKernels().emplace_back(reinterpret_cast<const void*>(kKernel));

// Loads the listed kernels onto the current device. Loading may wait for what runs on the GPU, so
// it must not happen while a peer's kernel waits for ours.
inline cudaError_t LoadListedKernels() {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaSuccess;
  for (size_t i = 0; i < ListedKernels().size() && status == cudaSuccess; ++i) {
    status = cudaFuncGetAttributes(&attributes, ListedKernels()[i]);
  }
  return status;
}

// Launches a kernel. Returns the error of this launch: cudaGetLastError() may tell of an earlier
// call of this thread.
template <auto kKernel, class... Parameters>
cudaError_t Launch(int blocks, int threads, cudaStream_t stream, Parameters... parameters) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Parameters...)>);
  void* addresses[] = {&parameters...};
  return cudaLaunchKernel(kListed<kKernel>, dim3(blocks), dim3(threads), addresses, 0, stream);
}

}  // namespace jax_intranode
