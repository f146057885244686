
#include <string>
#include <string_view>

#include "../health/call_sites.h"
#include "collectives_host.h"
#include "site_numbers.h"

namespace jax_intranode {
namespace {

struct HostPeerSite : PeerSite<HostCommunicator> {
  static constexpr char kName[] = "jax_intranode_host_peer_site";
  inline static ffi::TypeId id = {};
  std::string name;
  uint64_t identity;

  ffi::Error Read(ffi::Dictionary attributes) {
    if (ffi::Error error = PeerSite::Read(attributes); error.failure()) return error;
    const uint64_t description = SiteNumbers::DescriptionOf(buffer->name, text);
    identity = SiteNumbers::Identity(description, SiteNumbers::Get().Take(description));
    name = PeerCallName(buffer->name, text);
    CallSites::Get().Name(identity, text);
    return ffi::Error::Success();
  }
};

const char* Find(const void* xla, void* context, int32_t device, void** call, v1::Peers* peers) {
  host_handler_calls.fetch_add(1, std::memory_order_relaxed);
  std::string why;
  auto* const site = PeerSiteOf<HostPeerSite>(xla, context, &why);
  const v1::Peers* const found = site == nullptr ? nullptr : site->Find(device, &why);
  if (found == nullptr) return Keep(std::move(why));
  *call = site;
  *peers = *found;
  return nullptr;
}

void Run(void* call, int32_t device, void (*body)(void*, v1::HostWait*),
         void (*done)(void*, const char*), void* context) {
  const auto* site = static_cast<HostPeerSite*>(call);
  const auto& [group, rank, links] = site->buffer->communicator->members.at(device);
  // The body keeps the memory, should the program go while it runs.
  auto run = [body, context, memory = site->buffer](v1::HostWait* wait) { body(context, wait); };
  const std::shared_ptr<Ticket> ticket =
      group->Arrive(rank, site->identity, std::make_shared<HostBody>(site->name, std::move(run)));
  if (!ticket->Done()) group->KeepMoving();
  ticket->Then([done, context](const std::string& error) {
    done(context, error.empty() ? nullptr : error.c_str());
  });
}

}  // namespace

const v1::Api kHostPeerApi = {v1::kVersion, &Find, &Run, nullptr};

XLA_FFI_Error* HostPeerInstantiate(XLA_FFI_CallFrame* frame) {
  return InstantiateHandler<HostPeerSite>(frame);
}

}  // namespace jax_intranode
