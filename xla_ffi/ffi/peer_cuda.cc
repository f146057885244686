
#include <string>
#include <string_view>

#include "../../jax_intranode/include/jax_intranode/peer.h"
#include "../cuda/slab.h"
#include "../health/call_sites.h"
#include "collectives_cuda.h"

namespace jax_intranode {
namespace {

// Loads the kernels of all libraries onto the devices of a buffer, before one of them may wait.
std::string LoadLibraries(const DevicePeerBuffer& buffer) {
  for (const v1::Library* library : PeerLibraries::Get().All()) {
    for (const auto& [device, peers] : buffer.members) {
      const CurrentDevice current(static_cast<int>(device));
      if (const char* error = library->load()) {
        return "jax_intranode: loading the kernels of a library onto CUDA device " +
               std::to_string(device) + " failed: " + error;
      }
    }
  }
  return "";
}

struct DevicePeerSite : PeerSite<DeviceCommunicator> {
  static constexpr char kName[] = "jax_intranode_device_peer_site";
  inline static ffi::TypeId id = {};
  uint32_t number;  // of the call site

  ffi::Error Read(ffi::Dictionary attributes) {
    if (ffi::Error error = PeerSite::Read(attributes); error.failure()) return error;
    std::string error;
    try {
      error = LoadLibraries(*buffer);
    } catch (const std::runtime_error& thrown) {
      error = thrown.what();
    }
    if (!error.empty()) return ffi::Error::Internal(error);
    number = CallSites::Get().Number(text);
    return ffi::Error::Success();
  }
};

const char* Find(const void* xla, void* context, int32_t device, void** call, v1::Peers* peers) {
  device_handler_calls.fetch_add(1, std::memory_order_relaxed);
  std::string why;
  auto* const site = PeerSiteOf<DevicePeerSite>(xla, context, &why);
  if (site == nullptr) return Keep(std::move(why));
  *call = site;
  DeviceCommunicator& communicator = *site->buffer->communicator;
  if (communicator.closed) return Keep(kShutDown);
  const v1::Peers* const found = site->Find(device, &why);
  if (found != nullptr) why = communicator.Refuse(device);
  if (!why.empty()) return Keep(std::move(why));
  *peers = *found;
  peers->site = site->number;
  return nullptr;
}

void Failed(void* call, int32_t device, void* stream_of_call, const char* error) {
  const DevicePeerBuffer& buffer = *static_cast<DevicePeerSite*>(call)->buffer;
  const auto member = buffer.members.find(device);
  if (buffer.closed || member == buffer.members.end()) return;
  Launched(*buffer.communicator, device, static_cast<cudaStream_t>(stream_of_call),
           ffi::Error::Internal(error), &v1::Header(member->second, member->second.rank)->closed);
}

}  // namespace

const v1::Api kDevicePeerApi = {v1::kVersion, &Find, nullptr, &Failed};

XLA_FFI_Error* CudaPeerInstantiate(XLA_FFI_CallFrame* frame) {
  return InstantiateHandler<DevicePeerSite>(frame);
}

void ClosePeerBuffer(const std::string& name) {
  const auto buffer = DevicePeerBuffers::Get().Remove(name);
  if (!buffer) return;
  buffer->closed = true;
  for (const auto& [device, peers] : buffer->members) {
    CloseNow(static_cast<int>(device), &v1::Header(peers, peers.rank)->closed);
  }
}

}  // namespace jax_intranode
